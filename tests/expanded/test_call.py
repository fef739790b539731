"""What a call through call_for_per_sample_grads gives: gradients of parameters and inputs, reductions, training."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample import call_for_per_sample_grads
from tests.expanded.helpers import Object, Run, both_reductions, check, r, squares, taken, total
from tests.models import mlp
from tests.reference import assert_same, definition, named


class Documented(nn.Module):
    """A module with a forward to be recognised by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """A scaled layer."""
        return self.layer(x) * scale


class TestCallable:
    def test_signature_and_docs(self) -> None:
        module = Documented()
        call = call_for_per_sample_grads(module)
        assert inspect.signature(call) == inspect.signature(module.forward)
        assert call.__doc__ == "A scaled layer."
        assert call.__name__ == "forward"

    def test_keywords_are_passed_on(self) -> None:
        module, x = Documented().double(), r(4, 3)
        call_for_per_sample_grads(module)(x, scale=3.0).square().sum().backward()
        assert_same(taken(module), definition(squares(module(x, scale=3.0)), module))

    def test_keywords_alone(self) -> None:
        module, x = Documented().double(), r(4, 3)
        call_for_per_sample_grads(module)(x=x).square().sum().backward()
        assert_same(taken(module), definition(squares(module(x)), module))

    def test_output_is_the_modules(self) -> None:
        module, x = mlp().double(), r(4, 3)
        torch.testing.assert_close(call_for_per_sample_grads(module)(x), module(x), rtol=0, atol=0)


class TestParameters:
    @both_reductions
    def test_grad_stays_none(self, reduction: str) -> None:
        module = mlp().double()
        check(module, r(4, 3), loss_reduction=reduction)
        assert all(p.grad is None for p in module.parameters())

    def test_grad_stays_what_it_was(self) -> None:
        module, x = mlp().double(), r(4, 3)
        before = {name: torch.randn_like(p) for name, p in module.named_parameters()}
        for name, p in module.named_parameters():
            p.grad = before[name].clone()
        held = {name: p.grad for name, p in module.named_parameters()}
        call_for_per_sample_grads(module)(x).square().sum().backward()
        for name, p in module.named_parameters():
            assert p.grad is held[name]
            assert torch.equal(p.grad, before[name])
            assert p.grad_sample.shape == (4, *p.shape)

    def test_frozen(self) -> None:
        module = mlp().double()
        module[0].weight.requires_grad_(False)
        module[2].bias.requires_grad_(False)
        check(module, r(4, 3))
        assert not hasattr(module[0].weight, "grad_sample")
        assert not hasattr(module[2].bias, "grad_sample")

    def test_all_frozen(self) -> None:
        module, x = mlp().double().requires_grad_(False), r(4, 3).requires_grad_()
        call_for_per_sample_grads(module)(x).sum().backward()
        assert x.grad is not None
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    def test_frozen_and_thawed_after_wrapping(self) -> None:
        module, x = mlp().double(), r(4, 3)
        module[0].weight.requires_grad_(False)
        call = call_for_per_sample_grads(module)
        module[0].weight.requires_grad_(True)
        module[2].weight.requires_grad_(False)
        call(x).square().sum().backward()
        assert not hasattr(module[2].weight, "grad_sample")
        assert_same(taken(module), definition(squares(module(x)), module))

    def test_replaced_after_wrapping(self) -> None:
        module, x = mlp(3, 2, 2), r(4, 3)
        call, old = call_for_per_sample_grads(module), module[0].weight
        module[0].weight = nn.Parameter(r(2, 3))
        call(x).square().sum().backward()
        assert not hasattr(old, "grad_sample")
        assert_same(taken(module), definition(squares(module(x)), module))

    def test_used_several_times(self) -> None:
        layer = nn.Linear(3, 3).double()
        check(Run(lambda m, x: m.a(m.a(x).tanh()) + F.linear(x, m.a.weight), a=layer), r(4, 3))

    def test_tied_under_two_names(self) -> None:
        module = nn.Sequential(nn.Embedding(6, 3), nn.Tanh(), nn.Linear(3, 6)).double()
        module[2].weight = module[0].weight
        check(module, torch.randint(6, (4, 5)))
        assert set(named(module)) == {"0.weight", "2.bias"}

    @pytest.mark.parametrize("B", [4, 1, 0])
    def test_unreached(self, B: int) -> None:
        module = Run(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(3, 2), b=nn.Linear(3, 2), c=nn.Linear(3, 2)).double()
        x = r(B, 3)
        call_for_per_sample_grads(module)(x)[0].square().sum().backward()
        stacks = taken(module)
        assert_same(stacks, definition(squares(module(x)[0]), module))
        for name in ("b.weight", "b.bias", "c.weight", "c.bias"):
            assert not stacks[name].any()

    @both_reductions
    @pytest.mark.parametrize("B", [1, 0])
    def test_few_samples(self, B: int, reduction: str) -> None:
        check(mlp().double(), r(B, 3), loss_reduction=reduction)

    def test_mean_is_sum(self) -> None:
        module, x = mlp().double(), r(4, 3)
        stacks = []
        for reduction in ("sum", "mean"):
            total(squares(call_for_per_sample_grads(module, loss_reduction=reduction)(x)), reduction).backward()
            stacks.append(taken(module))
        assert_same(*stacks, rtol=1e-14)

    def test_loss_that_mixes_samples_after_the_call(self) -> None:
        """What each sample's own path contributes, of which the sum is the plain gradient."""
        module, x = mlp().double(), r(4, 3)
        plain = module(x)
        (cotangent,) = torch.autograd.grad(_mixed(leaf := plain.detach().requires_grad_()), leaf)
        want = definition((plain * cotangent).sum(1), module)
        _mixed(call_for_per_sample_grads(module)(x)).backward()
        assert_same(taken(module), want)


def _mixed(out: Tensor) -> Tensor:
    return (out @ out.T).logsumexp(1).sum()


class TestGradientsElsewhere:
    @both_reductions
    def test_inputs(self, reduction: str) -> None:
        """Those of the user's loss: never multiplied by the batch size."""
        module = Run(lambda m, x, more: m.a(x) + m.b(more["y"][0]), a=nn.Linear(3, 2), b=nn.Linear(4, 2)).double()
        x, y = r(5, 3).requires_grad_(), r(5, 4).requires_grad_()
        want = torch.autograd.grad(total(squares(module(x, {"y": [y]})), reduction), (x, y))
        check(module, x, {"y": [y]}, loss_reduction=reduction)
        torch.testing.assert_close((x.grad, y.grad), want, rtol=1e-12, atol=0)

    def test_of_what_is_hidden_in_an_object(self) -> None:
        """Inputs where nobody looks for them have their gradients all the same."""
        before, module, x = nn.Linear(3, 3).double(), Run(lambda m, box: m.a(box.logits), a=mlp()).double(), r(4, 3)
        (want,) = torch.autograd.grad(squares(module(Object(before(x), x))).sum(), before.weight)
        squares(call_for_per_sample_grads(module, batch_size=4)(Object(before(x), x))).sum().backward()
        torch.testing.assert_close(before.weight.grad, want, rtol=1e-12, atol=0)

    def test_of_inputs_that_the_module_changes_in_place(self) -> None:
        """Constant inputs may be changed; what has a graph would be changed behind its graph's back."""
        before, module, x = nn.Linear(3, 3).double(), nn.Sequential(nn.ReLU(True), nn.Linear(3, 2)).double(), r(4, 3)
        check(module, before(x).detach())
        hidden = before(x)
        kept = hidden.detach().clone()
        with pytest.raises(RuntimeError, match="in-place"):
            call_for_per_sample_grads(module)(hidden)
        assert torch.equal(hidden, kept)
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())

    def test_of_a_parameter_that_is_an_argument_too(self) -> None:
        module = Run(lambda m, x, w: m.a(x) @ w, a=nn.Linear(3, 2), w=torch.randn(2, 2)).double()
        check(module, r(4, 3), module.w, batch_size=4)

    def test_what_comes_before_and_after(self) -> None:
        """Other trainable modules have their ordinary gradients."""
        before, module, after = nn.Linear(3, 3).double(), mlp().double(), nn.Linear(2, 2).double()
        x, others = r(4, 3), [*before.parameters(), *after.parameters()]
        want = torch.autograd.grad(squares(after(module(before(x).tanh()))).sum(), others)
        stacks = definition(squares(after(module(before(x).tanh()))), module)
        squares(after(call_for_per_sample_grads(module)(before(x).tanh()))).sum().backward()
        assert_same(taken(module), stacks)
        torch.testing.assert_close(tuple(p.grad for p in others), want, rtol=1e-12, atol=0)
        assert not any(hasattr(p, "grad_sample") for p in others)


class TestReductions:
    many = (ps.Norms, lambda: ps.ClippedSum(1.0), ps.SecondMoment, ps.Gram, ps.Stack)

    @both_reductions
    @pytest.mark.parametrize("B", [4, 1, 0])
    def test_equal_those_of_reduce(self, B: int, reduction: str) -> None:
        module, x = mlp().double(), r(B, 3)
        want = ps.reduce(squares(module(x)), module, *(make() for make in self.many))
        call = call_for_per_sample_grads(module, loss_reduction=reduction, reductions=[make() for make in self.many])
        total(squares(call(x)), reduction).backward()
        got = call.results()
        assert isinstance(got, tuple)
        assert [type(a) for a in got] == [type(a) for a in want]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14, equal_nan=not B)
        assert all(p.grad is None and not hasattr(p, "grad_sample") for p in module.parameters())

    def test_again_and_again(self) -> None:
        module = mlp().double()
        call = call_for_per_sample_grads(module, reductions=[ps.Norms(), ps.ClippedSum(1.0)])
        for B in (4, 1, 6):
            x = r(B, 3)
            squares(call(x)).sum().backward()
            want = ps.reduce(squares(module(x)), module, ps.Norms(), ps.ClippedSum(1.0))
            torch.testing.assert_close(call.results(), want, rtol=1e-12, atol=0)

    def test_max_memory(self) -> None:
        module, x = mlp().double(), r(7, 3)
        call = call_for_per_sample_grads(module, reductions=[ps.Norms(), ps.ClippedSum(1.0)], max_memory=0)
        squares(call(x)).sum().backward()
        want = ps.reduce(squares(module(x)), module, ps.Norms(), ps.ClippedSum(1.0))
        torch.testing.assert_close(call.results(), want, rtol=1e-12, atol=0)

    def test_inputs_have_their_gradient(self) -> None:
        module, x = mlp().double(), r(4, 3).requires_grad_()
        (want,) = torch.autograd.grad(squares(module(x)).mean(), x)
        call = call_for_per_sample_grads(module, loss_reduction="mean", reductions=[ps.Norms()])
        squares(call(x)).mean().backward()
        torch.testing.assert_close(x.grad, want, rtol=1e-12, atol=0)


class TestTraining:
    @both_reductions
    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
    def test_summed_stacks_train_as_usual(self, optimizer: type[torch.optim.Optimizer], reduction: str) -> None:
        plain = mlp().double()
        ours = copy.deepcopy(plain)
        steps = [optimizer(m.parameters(), lr=0.05) for m in (plain, ours)]
        call = call_for_per_sample_grads(ours, loss_reduction=reduction)
        for B in (4, 1, 6):
            x = r(B, 3)
            squares(plain(x)).sum().backward()
            total(squares(call(x)), reduction).backward()
            for p in ours.parameters():
                p.grad = p.grad_sample.sum(0)
                p.grad_sample = None
            for step in steps:
                step.step()
                step.zero_grad()
            assert_same(_values(ours), _values(plain), rtol=1e-12)

    def test_step_between_call_and_backward(self) -> None:
        """The parameters that the graph holds have changed: PyTorch's own error, and nothing written."""
        module = mlp().double()
        loss = call_for_per_sample_grads(module)(r(4, 3)).square().sum()
        with torch.no_grad():
            module[2].weight.add_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()
        assert not any(hasattr(p, "grad_sample") for p in module.parameters())


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}
