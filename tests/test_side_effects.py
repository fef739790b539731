"""What `persample.grad` leaves alone: the graph, the model, hooks, generators, modes and other threads."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample.graph.execute.capture import Capture
from persample.graph.execute.plan import plan
from persample.graph.read.roots import Roots
from tests.models import Program, cnn_and_losses, mlp_and_losses, tied_and_losses
from tests.reference import assert_same, definition


def shuffled(B: int = 5) -> Program:
    """A matrix that happens to move samples and not to mix them: the probe has to look."""
    model, x, order = nn.Linear(3, 3).double(), torch.randn(B, 3).double(), torch.eye(B).double()[torch.randperm(B)]
    return model, lambda: model(order @ model(x).tanh()).square().sum(1)


def slow(B: int = 5) -> Program:
    """An op without a rule on the way to a parameter: the fallback has to run."""
    model, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)]).double(), torch.randn(B, 3).double()
    return model, lambda: Own.apply(x, model[0].weight).square().sum(1) + model[1](x).square().sum(1)


def checkpointed(B: int = 5) -> Program:
    model, x = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).double(), torch.randn(B, 3).double()
    block = lambda h: model[1](model[0](h).tanh()).tanh()  # noqa: E731
    return model, lambda: checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False).sum(1)


class Own(torch.autograd.Function):
    """x @ wᵀ, which fails in backward while `broken` is set."""

    broken = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        if Own.broken:
            raise ZeroDivisionError("out of order")
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


PROGRAMS: dict[str, Callable[..., Program]] = {
    "mlp": mlp_and_losses,
    "cnn": cnn_and_losses,
    "shuffled": shuffled,
    "slow": slow,
    "checkpointed": checkpointed,
    "tied": tied_and_losses,
}
every_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
pytestmark = pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    Own.broken = False


# ------------------------------------------------------------------------------------------------ the graph


@every_program
@pytest.mark.parametrize("B", [1, 5])
def test_retained_graphs_can_be_used_again(program: Callable[..., Program], B: int) -> None:
    model, forward = program(B)
    losses, want = forward(), definition(forward(), model)
    assert_same(ps.grad(losses, model, retain_graph=True), want)
    assert_same(ps.grad(losses, model, retain_graph=True), want)
    assert_same(definition(losses, model), want)
    losses.sum().backward()
    for name, p in model.named_parameters():
        total = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(total, want[name].sum(0), rtol=1e-9, atol=1e-12)


@every_program
@pytest.mark.parametrize("B", [1, 5])
def test_a_freed_graph_is_refused_with_the_remedy(program: Callable[..., Program], B: int) -> None:
    model, forward = program(B)
    losses = forward()
    ps.grad(losses, model)
    message = rf"graph of losses \({B},\) was freed by an earlier backward: .*retain_graph=True.*PyTorch says: "
    with pytest.raises(RuntimeError, match=message):
        ps.grad(losses, model)


def test_a_graph_freed_by_an_ordinary_backward_is_refused() -> None:
    model, forward = mlp_and_losses()
    losses = forward()
    losses.sum().backward()
    with pytest.raises(RuntimeError, match=r"was freed by an earlier backward: compute the losses again"):
        ps.grad(losses, model)
    with pytest.raises(RuntimeError, match=r"second time|was freed"):
        ps.explain(losses, model)


def test_the_graph_is_freed_as_autograd_frees_it() -> None:
    """The saved tensors of every node on the way must be let go."""
    model, forward = mlp_and_losses()
    losses = forward()
    ps.grad(losses, model)
    with pytest.raises(RuntimeError, match="second time"):
        losses.sum().backward()


# ------------------------------------------------------------------------------------------------ the model


@every_program
@pytest.mark.parametrize("B", [1, 5])
def test_no_grad_attribute_is_made(program: Callable[..., Program], B: int) -> None:
    model, forward = program(B)
    ps.grad(forward(), model)
    assert all(p.grad is None for p in model.parameters())


@every_program
def test_no_hook_stays_on_the_graph(program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch) -> None:
    model, forward = program()
    losses, seen = forward(), count_calls(monkeypatch)
    ps.grad(losses, model, retain_graph=True)
    assert seen, "the test looks at the wrong method"
    before = len(seen)
    losses.sum().backward()
    assert len(seen) == before


@pytest.mark.parametrize("independent", [False, True])
def test_nothing_stays_behind_after_an_exception(monkeypatch: pytest.MonkeyPatch, independent: bool) -> None:
    """An error in the middle of the backward, when hooks are in place and factors have been made."""
    torch.manual_seed(0)
    low, top, w, x = (
        nn.Linear(3, 3).double(),
        nn.Linear(3, 3).double(),
        nn.Parameter(torch.randn(3, 3).double()),
        torch.randn(4, 3).double(),
    )
    forward = lambda: top(Own.apply(low(x), w).tanh()).square().sum(1)  # noqa: E731
    params = {"w": w, **{f"top.{n}": p for n, p in top.named_parameters()}, "low": low.weight}
    losses, want = forward(), definition(forward(), params)
    hooked = [use for use in plan(Roots.of_losses(losses), list(params.values())).uses if use.passed]
    assert hooked, "nothing would be hooked: a useless test"
    attributes = {name: (dict(vars(p)), p._backward_hooks) for name, p in params.items()}
    seen = count_calls(monkeypatch)
    Own.broken = True
    with pytest.raises(ZeroDivisionError, match="out of order"):
        ps.grad(losses, params, retain_graph=True, independent=independent)
    Own.broken = False
    assert {name: (dict(vars(p)), p._backward_hooks) for name, p in params.items()} == attributes
    before = len(seen)
    assert_same(definition(losses, params), want)
    assert len(seen) == before
    assert_same(ps.grad(losses, params), want)


def test_no_state_is_kept_alive() -> None:
    """Cotangents and factors must go when the call returns, also while the graph is kept."""
    model, forward = mlp_and_losses()
    losses = forward()
    ps.grad(losses, model, retain_graph=True)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Capture]
    assert losses.requires_grad


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every call that a hook on the graph makes from now on."""
    seen: list[object] = []
    consume = Capture._consume

    def counted(self: Capture, node: Any, grads: Any) -> None:
        seen.append(node)
        consume(self, node, grads)

    monkeypatch.setattr(Capture, "_consume", counted)
    return seen


# ------------------------------------------------------------------------------------------------ surroundings


@every_program
def test_generators_are_untouched(program: Callable[..., Program]) -> None:
    model, forward = program()
    losses = forward()
    before, python = torch.get_rng_state(), random.getstate()
    ps.grad(losses, model)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python


def test_the_shuffled_program_is_probed() -> None:
    model, forward = shuffled()
    assert plan(Roots.of_losses(forward()), list(model.parameters())).samples.probed


@every_program
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_grad_mode_will_do(
    program: Callable[..., Program], mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    if program is checkpointed and mode is torch.inference_mode:
        pytest.skip("PyTorch itself cannot recompute there")
    model, forward = program()
    losses, want = forward(), definition(forward(), model)
    with mode():
        before = torch.is_grad_enabled()
        got = ps.grad(losses, model)
        assert torch.is_grad_enabled() == before
    assert not any(g.requires_grad for g in got.values())
    assert_same(got, want)


def test_inside_the_backward_of_another_graph() -> None:
    model, forward = mlp_and_losses()
    want, got = definition(forward(), model), []
    anchor = torch.zeros(1, requires_grad=True) * 1
    anchor.register_hook(lambda g: got.append(ps.grad(forward_with_grad(forward), model)))
    anchor.sum().backward()
    assert_same(got[0], want)


def forward_with_grad(forward: Callable[[], Tensor]) -> Tensor:
    with torch.enable_grad():
        return forward()


def test_two_threads_at_once() -> None:
    """Two models each, again and again: nothing is shared between calls."""
    problems: list[BaseException] = []
    start = threading.Barrier(2)

    def work(programs: list[Program]) -> None:
        try:
            wants = [definition(forward(), model) for model, forward in programs]
            start.wait()
            for _ in range(8):
                for (model, forward), want in zip(programs, wants, strict=True):
                    assert_same(ps.grad(forward(), model), want)
        except BaseException as error:
            problems.append(error)

    shared, every = mlp_and_losses(), list(PROGRAMS.values())  # one model in both threads, each with its own graph
    threads = [threading.Thread(target=work, args=([shared, *(p() for p in some)],)) for some in (every[:4], every[2:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]
