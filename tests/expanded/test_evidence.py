"""Which reading of a module's results is taken, where sizes alone would mislead: four samples, and other fours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample import call_for_per_sample_grads
from tests.expanded.helpers import Run, r, taken
from tests.reference import assert_same, definition

B = 4


def frozen(layer: nn.Module) -> nn.Module:
    return layer.double().requires_grad_(False)


def check(module: nn.Module, *args: Any, losses: Callable[[Any], Tensor], **options: Any) -> None:
    module.double()
    want = definition(losses(module(*args)), module)
    losses(call_for_per_sample_grads(module, **options)(*args)).sum().backward()
    assert_same(taken(module), want)


def assert_refused(module: nn.Module, *args: Any, **options: Any) -> None:
    """The backward says that samples cannot be told apart, and writes nothing."""
    out = call_for_per_sample_grads(module.double(), **options)(*args)
    loss = sum(t.square().sum() for t in (out if isinstance(out, tuple) else (out,)))
    with pytest.raises(ps.UnsupportedError, match=r"cannot tell the samples apart|without any sample"):
        loss.backward()
    assert all(getattr(p, "grad_sample", None) is None for p in module.parameters())


@pytest.mark.parametrize(("T", "size"), [(4, None), (4, B), (5, B)])
def test_positions_given_as_an_input(T: int, size: int | None) -> None:
    """As long as the batch, but no batch: nothing that is shared contradicts what was promised."""
    module = Run(lambda m, x, p: m.h(x + m.e(p)), h=nn.Linear(8, 3), e=nn.Embedding(20, 8))
    check(module, r(B, T, 8), torch.arange(T), losses=lambda y: y.square().sum((1, 2)), batch_size=size)


@pytest.mark.parametrize("classes", [4, 7])
def test_a_pooled_result_where_time_comes_first(classes: int) -> None:
    module = Run(lambda m, x: m.h(m.f(x).mean(0)), h=nn.Linear(6, classes), f=frozen(nn.Linear(3, 6)))
    check(module, r(5, B, 3), losses=lambda y: y.square().sum(1), batch_first=False)


def test_a_pooled_result_of_random_data() -> None:
    """A matrix of B x B may be either, but dropout is followed with the same random numbers."""
    module, x = Run(lambda m, x: m.h(nn.functional.dropout(x, 0.5).mean(0)), h=nn.Linear(3, B)).double(), r(5, B, 3)
    torch.manual_seed(0)
    want = definition(module(x).square().sum(1), module)
    torch.manual_seed(0)
    call_for_per_sample_grads(module, batch_first=False)(x).square().sum().backward()
    assert_same(taken(module), want)


def test_a_pooled_result_of_data_that_cannot_be_followed() -> None:
    """NumPy leaves no trace: a matrix of B x B may be either."""
    module = Run(lambda m, x: m.h(torch.from_numpy(x.numpy() * 2).mean(0)), h=nn.Linear(3, B))
    assert_refused(module, r(5, B, 3), batch_first=False)


@pytest.mark.parametrize("T", [4, 5])
def test_every_result_needs_evidence_of_its_own(T: int) -> None:
    module = Run(lambda m, x: (m.a(x), m.b((2 * x).transpose(0, 1))), a=nn.Linear(3, 2), b=nn.Linear(3, 2))
    check(module, r(B, T, 3), losses=lambda y: y[0].square().sum((1, 2)) + y[1].square().sum((0, 2)))


@pytest.mark.parametrize("T", [4, 5])
def test_two_branches_of_a_loss_inside(T: int) -> None:
    parts = {"a": nn.Linear(3, 2), "b": nn.Linear(40, 2), "f": frozen(nn.Linear(3, 40))}
    module = Run(lambda m, x: m.a(x).square().mean() + m.b(m.f(x).transpose(0, 1)).square().mean(), **parts).double()
    x = r(B, T, 3)
    each = module.a(x).square().mean((1, 2)) + module.b(module.f(x).transpose(0, 1)).square().mean((0, 2))
    want = definition(each, module)
    call_for_per_sample_grads(module, loss_reduction="mean")(x).backward()
    assert_same(taken(module), want)


@pytest.mark.parametrize("rows", [3, B])
@pytest.mark.parametrize("penalty", [lambda w: w, lambda w: w.square()], ids=["weight", "squares"])
def test_weights_among_the_results(rows: int, penalty: Callable[[Tensor], Tensor]) -> None:
    assert_refused(Run(lambda m, x: (m.a(x), penalty(m.a.weight)), a=nn.Linear(3, rows)), r(B, 3))


def test_weights_among_the_results_that_the_loss_does_not_use() -> None:
    module = Run(lambda m, x: (m.a(x), m.a.weight), a=nn.Linear(3, 2))
    check(module, r(B, 3), losses=lambda y: y[0].square().sum(1))


def test_as_many_tasks_as_samples() -> None:
    """Losses averaged over the batch, one per task: there is no batch in what is returned."""
    module = Run(lambda m, x: m.h(m.f(x)).square().mean(0), h=nn.Linear(40, B), f=frozen(nn.Linear(3, 40)))
    assert_refused(module, r(B, 3))


def test_as_many_classes_as_samples() -> None:
    mask = torch.arange(20).reshape(B, 5) % 7 != 0  # 17 of them, not as many of each sample
    assert_refused(Run(lambda m, x, mask: m.h(x[mask]), h=nn.Linear(3, B)), r(B, 5, 3), mask)


def test_a_loss_and_what_it_was_computed_from() -> None:
    """A scalar above a result with a batch: both parts of its gradient count."""

    def forward(m: Run, x: Tensor) -> tuple[Tensor, Tensor]:
        h = m.a(x)
        return h.square().mean(), h

    module, x = Run(forward, a=nn.Linear(3, 2)).double(), r(B, 3)
    h = module.a(x)
    want = definition(h.square().mean(1) + h.sin().sum(1), module)
    loss, h = call_for_per_sample_grads(module, loss_reduction="mean")(x)
    (loss + h.sin().sum() / B).backward()
    assert_same(taken(module), want)


class TestRefusals:
    def test_results_that_share_memory_changed_in_place(self) -> None:
        module = Run(lambda m, x: (h := m.a(x), h[:, 0]), a=nn.Linear(3, 2)).double()
        h, first = call_for_per_sample_grads(module)(r(B, 3))
        h.mul_(3)
        with pytest.raises(RuntimeError, match="share memory"):
            (h.sum() + first.sum()).backward()

    def test_a_generator_as_a_result(self) -> None:
        class Yields(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Linear(3, 2)

            def forward(self, x: Tensor) -> Any:
                yield self.a(x)

        with pytest.raises(RuntimeError, match="generator"):
            call_for_per_sample_grads(Yields())(torch.ones(B, 3))

    def test_hooks_that_would_see_no_gradient(self) -> None:
        module = nn.Linear(3, 2)
        module.weight.register_post_accumulate_grad_hook(lambda p: None)
        with pytest.raises(RuntimeError, match="hooks"):
            call_for_per_sample_grads(module)(torch.ones(B, 3))

    def test_data_parallel(self) -> None:
        with pytest.raises(RuntimeError, match=r"module\.module"):
            call_for_per_sample_grads(nn.DataParallel(nn.Linear(3, 2)))

    def test_compiled(self) -> None:
        with pytest.raises(RuntimeError, match=r"torch\.compile"):
            call_for_per_sample_grads(torch.compile(nn.Linear(3, 2)))  # type: ignore[arg-type]


def test_input_gradients_of_a_mean_are_those_of_autograd_bit_for_bit() -> None:
    module, x = nn.Linear(3, 2), torch.randn(3, 3, requires_grad=True)
    (want,) = torch.autograd.grad(module(x).square().sum(1).mean(), x)
    call_for_per_sample_grads(module, loss_reduction="mean")(x).square().sum(1).mean().backward()
    assert torch.equal(x.grad, want)


def test_following_data_keeps_none_of_it() -> None:
    """What is noted are functions and numbers: tensors of data die as they would."""
    alive = []

    def forward(m: Run, x: Tensor) -> Tensor:
        for _ in range(5):
            x = (x * 1.01).tanh()
            alive.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
        return m.a(x)

    out = call_for_per_sample_grads(Run(forward, a=nn.Linear(3, 2)).double())(r(B, 3))
    assert [ref.expired() for ref in alive] == [True] * 4 + [False], "the layer's own input is saved by the graph"
    assert out.requires_grad


def test_evidence_is_of_this_call() -> None:
    """The same functions of the same shapes, with other indices: four tokens of every sample, then sixteen anyhow."""
    regular, ragged = torch.ones(B, 5, dtype=torch.bool), torch.ones(B, 5, dtype=torch.bool)
    regular[:, 0] = False
    ragged[0, :2] = ragged[1, :2] = False
    module = Run(lambda m, x, mask: m.h(x[mask]), h=nn.Linear(3, 2))
    check(module, r(B, 5, 3), regular, losses=lambda y: y.square().unflatten(0, (B, 4)).sum((1, 2)))
    for p in module.parameters():
        p.grad_sample = None
    assert_refused(module, r(B, 5, 3), ragged)
