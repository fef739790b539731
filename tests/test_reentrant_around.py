"""Reentrant checkpoints and what is around them: random numbers, modes, hooks, memory, every way to ask."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample import dp
from persample.testing import check
from tests.modes import megabytes
from tests.reference import assert_same, definition, vectors

reentrant = partial(checkpoint, use_reentrant=True)


class Blocks(nn.Module):
    """A layer, then blocks in checkpoints."""

    def __init__(self, run: Callable[..., Any] = reentrant, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.run, self.drop, self.calls = run, drop, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + self.run(partial(self.body, block), h)
        return h

    def body(self, block: nn.Module, h: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(block(h).tanh(), self.drop)


def made(B: int = 5, **options: Any) -> tuple[Blocks, Tensor]:
    torch.manual_seed(0)
    return Blocks(**options).double(), torch.randn(B, 3).double()


def square(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def wanted(model: Blocks, x: Tensor) -> dict[str, Tensor]:
    """By definition, of the same program without checkpoints."""
    before, model.run = model.run, lambda fn, *args: fn(*args)
    try:
        return definition(square(model(x)), model)
    finally:
        model.run = before


def test_the_users_random_numbers_go_on_as_if_nothing_had_been() -> None:
    model, x = made(drop=0.5)
    torch.manual_seed(3)
    want = wanted(model, x)
    torch.manual_seed(3)
    losses = square(model(x))
    state = torch.get_rng_state()
    torch.rand(7)
    torch.set_rng_state(state)
    assert_same(ps.grad(losses, model), want)
    assert torch.equal(torch.get_rng_state(), state)


def test_random_numbers_that_are_not_kept() -> None:
    model, x = made(run=partial(reentrant, preserve_rng_state=False), drop=0.5)
    losses = square(model(x))
    state = torch.get_rng_state()
    with pytest.raises(ps.UnsupportedError, match=r"random numbers.*use checkpoint\(\.\.\., preserve_rng_state=True\)"):
        ps.grad(losses, model)
    assert torch.equal(torch.get_rng_state(), state)
    model.drop = 0.0
    assert_same(ps.grad(square(model(x)), model), wanted(model, x))


def test_autocast_is_as_it_was() -> None:
    model, x = made()
    model.float()
    seen: list[torch.dtype] = []
    body = model.body

    def watched(block: nn.Module, h: Tensor) -> Tensor:
        seen.append(block(h).dtype)
        return body(block, h)

    model.body = watched  # type: ignore[method-assign]
    for inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            losses = square(model(x.float()).float())
            same = square(Blocks.forward(_unchecked(model), x.float()).float())
            got = ps.grad(losses, model) if inside else {}
        got = got or ps.grad(losses, model)
        assert_same(got, ps.grad(same, model), rtol=1e-6)
    assert set(seen) == {torch.bfloat16}


def _unchecked(model: Blocks) -> Any:
    class Plain:
        first, blocks, body = model.first, model.blocks, model.body
        run = staticmethod(lambda fn, *args: fn(*args))

    return Plain


def test_tied_weights_in_regions_of_one_autocast() -> None:
    """Casts that one region keeps are not another's."""
    model, x = made()
    model.float()
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    with torch.autocast("cpu", torch.bfloat16):
        losses = square(model(x.float()).float())
        same = square(Blocks.forward(_unchecked(model), x.float()).float())
        assert_same(ps.grad(losses, model), ps.grad(same, model), rtol=2e-2)  # sums of casts in another order


def test_an_input_changed_in_place_is_pytorchs_error() -> None:
    model, x = made()
    h = model.first(x)
    losses = square(reentrant(model.blocks[0], h))
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ps.grad(losses, model)


def test_a_graph_that_was_freed_is_told_with_the_remedy() -> None:
    model, x = made()
    losses = square(model(x))
    ps.grad(losses, model)
    with pytest.raises(RuntimeError, match=r"freed by an earlier backward.*retain_graph=True"):
        ps.grad(losses, model)


def test_an_ordinary_backward_works_before_and_after() -> None:
    model, x = made()
    losses = square(model(x))
    ps.grad(losses, model, retain_graph=True)
    losses.sum().backward(retain_graph=True)
    total = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    want = wanted(model, x)
    assert_same(ps.grad(losses, model), want)
    assert_same({k: v[None] for k, v in total.items()}, {k: v.sum(0)[None] for k, v in want.items()})
    assert all(torch.equal(p.grad, total[name]) for name, p in model.named_parameters())  # type: ignore[arg-type]


def test_a_failing_call_leaves_the_graph_as_it_was() -> None:
    model, x = made()
    losses = square(model(x))

    def stop(g: Tensor) -> None:
        raise KeyError("a hook's")

    handle = losses.register_hook(stop)
    with pytest.raises(KeyError, match="a hook's"):
        ps.grad(losses, model, retain_graph=True)
    handle.remove()
    assert_same(ps.grad(losses, model), wanted(model, x))
    assert "apply" not in vars(next(_checkpoints(square(model(x)).grad_fn)))


def _checkpoints(node: Any) -> Any:
    stack, seen = [node], set()
    while stack:
        here = stack.pop()
        if here is None or here in seen:
            continue
        seen.add(here)
        if type(here).__name__ == "CheckpointFunctionBackward":
            yield here
        stack += [child for child, _ in here.next_functions]


def test_regions_whose_inputs_have_no_gradients_get_none() -> None:
    """As in an ordinary backward, of which PyTorch warns."""
    model, x = made()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        losses = square(model.blocks[0](reentrant(model.blocks[1], F.pad(x, (0, 1)))))
    losses.sum().backward(retain_graph=True)
    got = ps.grad(losses, model)
    assert got["blocks.1.weight"].count_nonzero() == 0
    assert model.blocks[1].weight.grad is None
    assert_same(
        {"w": got["blocks.0.weight"].sum(0)[None]},
        {"w": model.blocks[0].weight.grad[None]},  # type: ignore[union-attr, index]
    )


def test_frozen_parameters() -> None:
    model, x = made()
    model.blocks[1].requires_grad_(False)
    model.first.weight.requires_grad_(False)
    assert_same(ps.grad(square(model(x)), model), wanted(model, x))


def test_a_region_is_run_twice_more_at_most() -> None:
    model, x = made()
    losses = square(model(x))
    model.calls = 0
    ps.grad(losses, model)
    assert model.calls <= 2 * len(model.blocks)


def test_interactions_inside_are_named() -> None:
    for layer, op in ((nn.BatchNorm1d(4), "NativeBatchNorm"), (nn.Softmax(0), "Softmax")):
        model, x = made()
        model.blocks[1] = nn.Sequential(nn.Linear(4, 4), layer).double()
        with pytest.raises(ps.InteractionError, match=op):
            ps.grad(square(model(x)), model, independent=True)
    model, x = made()
    assert_same(ps.grad(square(model(x)), model, independent=True), wanted(model, x))


def test_custom_functions_inside_are_not_vouched_for() -> None:
    from tests.case_library.functions import OwnLinear

    model, x = made()
    body = lambda h, b: OwnLinear.apply(h, model.blocks[0].weight, b)  # noqa: E731
    losses = square(reentrant(body, F.pad(x, (0, 1)), model.blocks[0].bias))
    with pytest.raises(ps.InteractionError, match="cannot see inside custom OwnLinear"):
        ps.grad(losses, model, independent=True)


def test_every_use_is_explained() -> None:
    model, x = made()
    model.run = lambda fn, *args: fn(*args)
    want = ps.explain(square(model(x)), model)
    model.run = reentrant
    assert ps.explain(square(model(x)), model).rows == want.rows


def test_one_sample_and_none_are_explained() -> None:
    for B in (0, 1):
        model, x = made(B)
        rows = ps.explain(square(model(x)), model).rows
        assert {row.handling for row in rows} == {"one sample or none: an ordinary backward"}


def test_every_reduction_sees_the_same() -> None:
    model, x = made()
    want = wanted(model, x)
    flat = vectors(want)
    norms = flat.norm(dim=1)
    assert_same({"n": ps.norms(square(model(x)), model)}, {"n": norms})
    got = ps.reduce(square(model(x)), model, ps.Norms(), ps.ClippedSum(0.5), ps.SecondMoment(), ps.Gram())
    assert_same({"n": got[0]}, {"n": norms})
    scale = (0.5 / norms).clamp(max=1)
    clipped = {name: (g * scale.reshape(-1, *[1] * (g.ndim - 1))).sum(0)[None] for name, g in want.items()}
    assert_same({name: g[None] for name, g in got[1].items()}, clipped)
    assert_same({name: g[None] for name, g in got[2].items()}, {k: v.square().mean(0)[None] for k, v in want.items()})
    assert_same({"g": got[3]}, {"g": flat @ flat.t()})


def test_backward_fills_the_gradients() -> None:
    model, x = made()
    want = wanted(model, x)
    ps.backward(square(model(x)), model, ps.ClippedSum(1e6))
    assert_same({n: p.grad[None] for n, p in model.named_parameters()}, {k: v.sum(0)[None] for k, v in want.items()})  # type: ignore[index]


def test_backward_of_an_empty_batch_is_zeros() -> None:
    model, x = made(0)
    ps.backward(square(model(x)), model, ps.ClippedSum(1.0))
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_check_knows_how_to_ask_pytorch() -> None:
    """There is no `torch.autograd.grad` of such graphs: by `loss.backward()`, and gradients stay as they were."""
    model, x = made()
    x.requires_grad_()
    grads = [torch.randn_like(p) for p in model.parameters()]
    for p, g in zip(model.parameters(), grads, strict=True):
        p.grad = g
    report = check(lambda: square(model(x)), model)
    assert report.ok
    assert min(row.magnitude for row in report.rows) > 0
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert x.grad is None


def test_monitored() -> None:
    model, x = made()
    monitor = ps.Monitor(model)
    monitor.backward(square(model(x)))
    want = wanted(model, x)
    flat = vectors(want)
    assert monitor.last is not None
    assert all(p.grad is not None for p in model.parameters())
    assert_same({"norms": monitor.last.norms}, {"norms": flat.norm(dim=1)})


def test_private_training() -> None:
    _, x = made(16)

    def trained(run: Callable[..., Any]) -> list[Tensor]:
        data = torch.utils.data.TensorDataset(x.float())
        model, _ = made(run=run)
        model.float()
        plan = dp.Plan(examples=16, batch_size=8, steps=3, noise_multiplier=0.5, delta=1e-3)
        private = dp.Private(model, torch.optim.SGD(model.parameters(), 0.1), plan, ps.ClippedSum(1.0), seed=1)
        for (batch,) in private.batches(data):
            private.step(square(model(batch)))
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(trained(reentrant), trained(lambda fn, *args: fn(*args)), rtol=1e-5, atol=1e-6)


def test_calls_for_per_sample_grads_are_refused() -> None:
    """The function is run again when the call is over, and knows nothing of the weights that recorded it."""
    model, x = made()
    with pytest.raises(ps.UnsupportedError, match="use_reentrant=False"):
        ps.call_for_per_sample_grads(model)(x)


def test_a_loop_whose_regions_change() -> None:
    """The second step is planned from memory; what a region does may be another thing every time."""
    model, x = made()
    for step in range(6):
        model.blocks[1] = (nn.Linear(4, 4) if step % 3 else nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))).double()
        y = torch.randn_like(x)
        assert_same(ps.grad(square(model(y)), model), wanted(model, y))


def test_in_another_thread() -> None:
    """Numbers that PyTorch gives to nodes are counted per thread."""
    model, x = made()
    graph, got = square(model(x)), list[dict[str, Tensor]]()
    thread = Thread(target=lambda: got.append(ps.grad(graph, model)))
    thread.start()
    thread.join()
    assert_same(got[0], wanted(model, x))


def test_tensors_of_another_region_are_refused() -> None:
    """What a function has kept for another one is not given to it."""
    model, x = made()
    kept = {"h": torch.zeros(5, 4).double()}

    def keep(h: Tensor) -> Tensor:
        kept["h"] = model.blocks[0](h)
        return kept["h"].tanh()

    h = reentrant(lambda h: model.blocks[1](h) + kept["h"], model.first(x))
    with pytest.raises(
        ps.UnsupportedError, match=r"a result of Addmm of shape \(5, 4\) without being given it: pass it as an argument"
    ):
        ps.grad(square(reentrant(keep, h)), model)


def test_a_function_that_returns_what_it_was_not_given_is_refused() -> None:
    """The tensor's history is then the checkpoint's, also for the function itself when it is run again."""
    model, x = made()
    h = model.first(x)
    other = model.blocks[0](h)
    losses = square(reentrant(lambda a: (model.blocks[1](a), other), h)[1] * other)
    with pytest.raises(ps.UnsupportedError, match=r"returned a tensor that it was not given.*return a clone"):
        ps.grad(losses, model)


def test_a_function_that_does_something_else_is_refused() -> None:
    model, x = made()
    width = [4]
    losses = square(reentrant(lambda h: model.blocks[0](h)[:, : width[0]], model.first(x)))
    width[0] = 2
    with pytest.raises(
        ps.UnsupportedError, match=r"shapes \[\(5, 4\)\] in the forward pass, and 1 of shapes \[\(5, 2\)\]"
    ):
        ps.grad(losses, model)


def test_a_function_without_gradients_is_refused() -> None:
    """As by PyTorch's own backward: what is not to have gradients, and what has lost them, look the same."""
    model, x = made()
    losses = square(model.blocks[0](reentrant(lambda h: h.detach() * 2, model.first(x))))
    with pytest.raises(RuntimeError, match="none of output has requires_grad=True"):
        losses.sum().backward(retain_graph=True)
    with pytest.raises(ps.UnsupportedError, match=r"of shapes \[\(5, 4\)\], has a gradient.*without a checkpoint"):
        ps.grad(losses, model)


def test_a_function_that_saves_something_else_is_refused() -> None:
    """Which its results do not show."""
    model, x = made()
    runs: list[Tensor] = []

    def body(h: Tensor) -> Tensor:
        runs.append(h)
        return model.blocks[0](h) if len(runs) < 3 else model.blocks[0](h.sin()).exp().tanh()

    losses = square(reentrant(body, model.first(x)))
    with pytest.raises(ps.UnsupportedError, match=r"did something else when it was run again.*the same every time"):
        ps.grad(losses, model)


def test_reentrant_checkpoints_of_others_are_refused() -> None:
    class CheckpointFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            ctx.run_function = run
            return run(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise AssertionError

    model, x = made()
    losses = square(CheckpointFunction.apply(model.blocks[0], model.first(x)))  # type: ignore[no-untyped-call]
    with pytest.raises(ps.UnsupportedError, match="use_reentrant=False"):
        ps.grad(losses, model)


MEMORY = """
import sys, torch, persample as ps
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
net = nn.ModuleList(nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())]) for _ in range(8))
x = torch.randn(2, 8192, 64, requires_grad=True)  # 4 MB per activation
def run(x, net, how):
    h = x
    for block in net:
        h = checkpoint(block, h, use_reentrant=True) if how == "checkpoint" else block(h)
    return h.square().sum((1, 2))
for how in ("checkpoint", "plain"):  # what is used first costs more
    small = run(x[:, :9], net[:2], how)
    small.sum().backward(retain_graph=True)
    ps.grad(small, net[:2])
net.zero_grad()
before = peak()
losses = run(x, net, sys.argv[1])
ps.grad(losses, net) if sys.argv[2] == "grad" else losses.sum().backward()
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets up glibc")
def test_checkpointing_still_saves_memory() -> None:
    ours, plain = megabytes(MEMORY, "checkpoint", "grad"), megabytes(MEMORY, "plain", "grad")
    ordinary = megabytes(MEMORY, "checkpoint", "backward")
    assert ours < 0.6 * plain, f"{ours:.0f} MB with, {plain:.0f} MB without checkpointing"
    assert ours < 1.5 * ordinary, f"{ours:.0f} MB, an ordinary backward {ordinary:.0f} MB"
