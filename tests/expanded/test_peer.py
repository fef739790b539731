"""PyTorch's own call_for_per_sample_grads, and ours, on what it is known to get wrong.

The tests named `test_peer_...` document a peer: what PyTorch's function does on the torch named in `OBSERVED`. They are
not about this package, and are skipped on other versions. Beside each stands the test of ours on the same program.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads as peers

import persample as ps
from tests.expanded.helpers import Run, both_reductions, taken
from tests.expanded.peer import AGREES, FAILS, OBSERVED, Case
from tests.expanded.peer_cases import CASES
from tests.models import mlp
from tests.reference import assert_same, definition

documents_a_peer = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) != OBSERVED, reason="the peer was observed on another torch"
)
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
runs = [pytest.param(case, B, id=f"{case.name}-B{B}") for case in CASES for B in case.batches]


@documents_a_peer
@every_case
def test_peer_is_wrong_or_fails(case: Case) -> None:
    """What PyTorch's function does: `WRONG` and `FAILS` as said, and `AGREES` for their neighbours."""
    B = case.batches[0]
    if case.peer == FAILS:
        with pytest.raises((RuntimeError, NotImplementedError, AttributeError), match=case.message):
            case.build(B).got(peers)
        return
    got, want = case.build(B).got(peers), case.build(B).want()
    if case.peer == AGREES:
        assert_same(got, want, case.rtol)
    else:
        assert {name: g.shape for name, g in got.items()} == {name: g.shape for name, g in want.items()}
        assert max(float((got[name] - want[name]).abs().max()) for name in want) > 0.1


@both_reductions
@pytest.mark.parametrize(("case", "B"), runs)
def test_ours(case: Case, B: int, reduction: str) -> None:
    program = case.build(B)
    if B in case.refused:
        with pytest.raises(ps.InteractionError, match="samples interact in"):
            program.got(ps.call_for_per_sample_grads, reduction)
        assert not any(hasattr(p, "grad_sample") for p in program.module.parameters())
        return
    want = case.build(B).want()
    warned = pytest.warns(ps.PerformanceWarning, match="fast rule") if case.slow and B > 1 else nullcontext()
    with warned:
        got = program.got(ps.call_for_per_sample_grads, reduction)
    assert_same(got, want, case.rtol)


class TestInputChangedInPlace:
    """Between the call and the backward: the gradient is no longer to be had."""

    def setup_method(self) -> None:
        self.module, self.x = nn.Linear(3, 2).double(), torch.randn(4, 3).double()

    @documents_a_peer
    def test_peer_is_wrong(self) -> None:
        x = self.x.clone()
        want = definition(self.module(x).square().sum(1), self.module)
        loss = peers(self.module)(x).square().sum()
        x.add_(1)
        loss.backward()
        assert float((taken(self.module)["weight"] - want["weight"]).abs().max()) > 0.1

    @both_reductions
    def test_ours_raises(self, reduction: str) -> None:
        x = self.x.clone()
        loss = ps.call_for_per_sample_grads(self.module, loss_reduction=reduction)(x).square().sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()
        assert not hasattr(self.module.weight, "grad_sample")

    def test_ours_knows_of_ids_too(self) -> None:
        module, ids = nn.Embedding(6, 3).double(), torch.zeros(4, 2, dtype=torch.long)
        loss = ps.call_for_per_sample_grads(module)(ids).square().sum()
        ids.add_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()


class TestGradientOfInputsAlone:
    """Asked with torch.autograd.grad, or with backward(inputs=...): parameters are not concerned."""

    def setup_method(self) -> None:
        self.module, self.x = mlp().double(), torch.randn(4, 3).double().requires_grad_()

    @documents_a_peer
    def test_peer_writes_stacks_all_the_same(self) -> None:
        torch.autograd.grad(peers(self.module)(self.x).square().sum(), self.x)
        assert all(hasattr(p, "grad_sample") for p in self.module.parameters())

    def test_ours_gives_the_gradient_and_writes_nothing(self) -> None:
        (want,) = torch.autograd.grad(self.module(self.x).square().sum(), self.x)
        (got,) = torch.autograd.grad(ps.call_for_per_sample_grads(self.module)(self.x).square().sum(), self.x)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        assert not any(hasattr(p, "grad_sample") for p in self.module.parameters())

    def test_ours_with_backward_inputs(self) -> None:
        (want,) = torch.autograd.grad(self.module(self.x).square().sum(), self.x)
        ps.call_for_per_sample_grads(self.module)(self.x).square().sum().backward(inputs=[self.x])
        torch.testing.assert_close(self.x.grad, want, rtol=1e-12, atol=0)
        assert not any(hasattr(p, "grad_sample") for p in self.module.parameters())

    def test_ours_writes_them_in_the_backward_that_follows(self) -> None:
        want = definition(self.module(self.x).square().sum(1), self.module)
        loss = ps.call_for_per_sample_grads(self.module)(self.x).square().sum()
        torch.autograd.grad(loss, self.x, retain_graph=True)
        loss.backward()
        assert_same(taken(self.module), want)


class TestStacksOfOtherSamples:
    """Two batches through one module: their samples have nothing to do with each other."""

    def setup_method(self) -> None:
        self.module = mlp().double()
        self.x, self.y = torch.randn(2, 4, 3).double()

    @documents_a_peer
    def test_peer_adds_them_when_two_calls_share_a_backward(self) -> None:
        call = peers(self.module)
        (call(self.x).square().sum() + call(self.y).square().sum()).backward()
        self._holds_the_sum()

    @documents_a_peer
    def test_peer_adds_them_when_a_call_finds_old_ones(self) -> None:
        call = peers(self.module)
        call(self.x).square().sum().backward()
        call(self.y).square().sum().backward()
        self._holds_the_sum()

    @documents_a_peer
    def test_peer_adds_a_second_backward_to_the_first(self) -> None:
        loss = peers(self.module)(self.x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        want = definition(self.module(self.x).square().sum(1), self.module)
        assert_same(taken(self.module), {name: 2 * g for name, g in want.items()})

    def _holds_the_sum(self) -> None:
        one, two = (definition(self.module(x).square().sum(1), self.module) for x in (self.x, self.y))
        assert_same(taken(self.module), {name: one[name] + two[name] for name in one})

    def test_ours_raises_when_two_calls_share_a_backward(self) -> None:
        call = ps.call_for_per_sample_grads(self.module)
        with pytest.raises(RuntimeError, match="grad_sample"):
            (call(self.x).square().sum() + call(self.y).square().sum()).backward()

    def test_ours_raises_when_a_call_finds_old_ones(self) -> None:
        call = ps.call_for_per_sample_grads(self.module)
        want = definition(self.module(self.x).square().sum(1), self.module)
        call(self.x).square().sum().backward()
        with pytest.raises(RuntimeError, match=r"0\.weight"):
            call(self.y)
        assert_same(taken(self.module), want)
        call(self.y).square().sum().backward()
        assert_same(taken(self.module), definition(self.module(self.y).square().sum(1), self.module))

    def test_ours_takes_calls_one_after_the_other(self) -> None:
        """The first graph is still there, and not used any more."""
        call = ps.call_for_per_sample_grads(self.module)
        first, second = call(self.x).square().sum(), call(self.y).square().sum()
        for loss, x in ((second, self.y), (first, self.x)):
            loss.backward()
            assert_same(taken(self.module), definition(self.module(x).square().sum(1), self.module))


class TestUnusedParameter:
    def setup_method(self) -> None:
        self.module = Run(lambda m, x: m.used(x), used=nn.Linear(3, 2), spare=nn.Linear(2, 2)).double()
        self.x = torch.randn(4, 3).double()

    @documents_a_peer
    def test_peer_leaves_it_without_a_stack(self) -> None:
        peers(self.module)(self.x).square().sum().backward()
        assert hasattr(self.module.used.weight, "grad_sample")
        assert not hasattr(self.module.spare.weight, "grad_sample")

    def test_ours_gives_zeros(self) -> None:
        ps.call_for_per_sample_grads(self.module)(self.x).square().sum().backward()
        assert_same(taken(self.module), definition(self.module(self.x).square().sum(1), self.module))


def test_ours_leaves_a_plain_tensor_its_own_gradient() -> None:
    """A tensor that is no parameter of the module is a leaf like any other."""
    module, x = Run(lambda m, x: F.linear(x, weight, m.b), b=torch.randn(2)).double(), torch.randn(4, 3).double()
    weight = torch.randn(2, 3).double().requires_grad_()
    (want,) = torch.autograd.grad(module(x).square().sum(), weight)
    ps.call_for_per_sample_grads(module)(x).square().sum().backward()
    torch.testing.assert_close(weight.grad, want, rtol=1e-12, atol=0)
    assert not hasattr(weight, "grad_sample")
