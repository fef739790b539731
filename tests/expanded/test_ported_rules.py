"""Rules written for PyTorch's private expanded weights work here when only their imports are changed.

Every function that takes an ``api`` is such a program: ``api`` has the names that it imports, PyTorch's or ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

import persample as ps
from tests.expanded.helpers import Run, both_reductions, check_reductions, r, squares, taken, total
from tests.expanded.peer_modules import recomputed, turned
from tests.expanded.ported import OURS, PEER, both, stacks_of_a_call
from tests.reference import assert_same, definition

pytestmark = pytest.mark.usefixtures("float64")


def third_party(api: Any) -> Callable[..., Tensor]:
    """Somebody's function, x · weight^power + bias over the last dims, and the rule they wrote for it."""

    def gain(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, power: float = 1.0) -> Tensor:
        if has_torch_function((x, weight, bias)):
            return handle_torch_function(gain, (x, weight, bias), x, weight, bias=bias, power=power)
        out = x * weight**power
        return out if bias is None else out + bias

    @api.implements_per_sample_grads(gain)
    class GainPerSampleGrad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, kwarg_names: Any, _: Any, *expanded_args_and_kwargs: Any) -> Tensor:
            expanded_args, expanded_kwargs = api.standard_kwargs(kwarg_names, expanded_args_and_kwargs)
            ctx.batch_first = api.is_batch_first(expanded_args_and_kwargs)
            ctx.input, ctx.weight = expanded_args
            ctx.bias, ctx.power = expanded_kwargs["bias"], expanded_kwargs["power"]
            return api.forward_helper(gain, expanded_args, expanded_kwargs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, p = ctx.input, ctx.power
            for_input = None
            if x.requires_grad:
                for_input = grad * api.unpack_expanded_weight_or_tensor(ctx.weight, lambda w: w**p)
            if not ctx.batch_first:
                x, grad = x.transpose(0, 1), grad.transpose(0, 1)
            dims = len(ctx.weight.shape)
            api.set_grad_sample_if_exists(
                ctx.weight, lambda w: api.sum_over_all_but_batch_and_last_n(grad * x * p * w ** (p - 1), dims)
            )
            api.set_grad_sample_if_exists(ctx.bias, lambda _: api.sum_over_all_but_batch_and_last_n(grad, dims))
            return None, None, for_input, None, None, None

    return gain


@pytest.fixture
def gain(api: Any, registries: None) -> Callable[..., Tensor]:
    return third_party(api)


class Gain(nn.Module):
    """A layer around somebody's function."""

    def __init__(self, function: Callable[..., Tensor], *shape: int, bias: bool = True) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(*shape) + 1)
        self.bias = nn.Parameter(r(*shape)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, bias=self.bias, power=2.0)


class Again(nn.Module):
    """One layer after another, which is applied twice."""

    def __init__(self, first: nn.Module, then: nn.Module) -> None:
        super().__init__()
        self.first, self.then = first, then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.then(self.first(x)).tanh())


def nets(gain: Callable[..., Tensor]) -> dict[str, nn.Module]:
    once, frozen = Gain(gain, 3), Gain(gain, 3)
    frozen.weight.requires_grad_(False)
    return {
        "alone": Gain(gain, 4),
        "between": nn.Sequential(nn.Linear(4, 3), nn.Tanh(), once, nn.Tanh(), nn.Linear(3, 2)),
        "twice": Again(nn.Linear(4, 3), Gain(gain, 3)),
        "matrix": nn.Sequential(Gain(gain, 2, 4, bias=False), nn.LayerNorm(4)),
        "frozen-weight": nn.Sequential(nn.Linear(4, 3), frozen, nn.Linear(3, 2)),
    }


ours = pytest.mark.parametrize("api", [OURS], ids=["ours"])
NETS = ["alone", "between", "twice", "matrix", "frozen-weight"]
at_sizes = pytest.mark.parametrize(
    ("api", "B"),
    [pytest.param(PEER, n, id=f"peer-{n}") for n in (5, 1)]
    + [pytest.param(OURS, n, id=f"ours-{n}") for n in (5, 1, 0)],
)


@at_sizes
@both_reductions
@pytest.mark.parametrize("name", NETS)
def test_own_rule_in_a_module(api: Any, B: int, gain: Callable[..., Tensor], name: str, reduction: str) -> None:
    module, x = nets(gain)[name], r(B, 2, 4)
    want = definition(squares(module(x)), module)
    assert_same(stacks_of_a_call(api, module, x, squares, loss_reduction=reduction), want)


@at_sizes
@both_reductions
@pytest.mark.parametrize("name", NETS)
def test_own_rule_lets_the_inputs_gradient_through(
    api: Any, B: int, gain: Callable[..., Tensor], name: str, reduction: str
) -> None:
    module, x = nets(gain)[name], r(B, 2, 4, grad=True)
    losses = squares(module(x))
    want, (dx,) = definition(losses, module), torch.autograd.grad(losses.sum(), x)
    assert_same(stacks_of_a_call(api, module, x, squares, loss_reduction=reduction), want)
    torch.testing.assert_close(x.grad, dx if reduction == "sum" else dx / max(B, 1))


@at_sizes
@both_reductions
@pytest.mark.parametrize("dim", [0, 1], ids=["batch-first", "batch-second"])
def test_own_rule_by_hand(api: Any, B: int, gain: Callable[..., Tensor], reduction: str, dim: int) -> None:
    weights = [(torch.rand(4) + 1).requires_grad_(), r(4, grad=True)]
    x = r(3, B, 4).movedim(1, dim).requires_grad_()
    plain = squares(gain(x, *weights, power=3.0), dim)
    want, (dx,) = definition(plain, weights), torch.autograd.grad(plain.sum(), x)
    w, b = (api.ExpandedWeight(p, B, reduction) for p in weights)
    for ew in (w, b):
        ew.set_batch_first(dim == 0)
    total(squares(gain(x, w, bias=b, power=3.0), dim), reduction).backward()
    assert_same([p.grad_sample for p in weights], want)
    assert weights[0].grad is None
    torch.testing.assert_close(x.grad, dx if reduction == "sum" else dx / max(B, 1))


@both
def test_own_rule_adds_up_uses_and_smaller_batches(api: Any, gain: Callable[..., Tensor]) -> None:
    w, x, y = (torch.rand(4) + 1).requires_grad_(), r(5, 4), r(2, 4)
    ew = api.ExpandedWeight(w, 5, "sum")
    ew.set_allow_smaller_batches(True)
    (squares(gain(x, ew, power=2.0)).sum() + squares(gain(y, ew, power=2.0)).sum()).backward()
    short = F.pad(squares(gain(y, w, power=2.0)), (0, 3))
    assert_same([w.grad_sample], definition(squares(gain(x, w, power=2.0)) + short, [w]))


@both
def test_own_rule_refuses_another_batch_size(api: Any, gain: Callable[..., Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"4.* batch size.* 5"):
        gain(r(4, 3), api.ExpandedWeight(r(3, grad=True), 5, "sum"))


@both
def test_own_rule_refuses_a_plain_parameter(api: Any, gain: Callable[..., Tensor]) -> None:
    w, b = r(3, grad=True), r(3, grad=True)
    out = gain(r(5, 3), api.ExpandedWeight(w, 5, "sum"), b)
    with pytest.raises(RuntimeError, match=r"plain|normal"):
        out.sum().backward()


@ours
@both_reductions
@pytest.mark.parametrize("B", [5, 1, 0])
@pytest.mark.parametrize("name", NETS)
def test_own_rule_feeds_reductions(gain: Callable[..., Tensor], name: str, B: int, reduction: str) -> None:
    check_reductions(nets(gain)[name], r(B, 2, 4), reduction)


@ours
@pytest.mark.parametrize("T", [2, 5], ids=["T=2", "T=B"])
@pytest.mark.parametrize("name", ["alone", "between", "twice"])
def test_own_rule_in_a_module_with_the_batch_second(gain: Callable[..., Tensor], name: str, T: int) -> None:
    module, x = nets(gain)[name], r(T, 5, 4)
    want = definition(squares(module(x), 1), module)
    assert_same(stacks_of_a_call(OURS, module, x, lambda out: squares(out, 1), batch_first=False), want)


@ours
@pytest.mark.parametrize("T", [2, 5], ids=["T=2", "T=B"])
def test_own_rule_given_the_samples_elsewhere_is_refused(gain: Callable[..., Tensor], T: int) -> None:
    """A rule knows the batch in one dim only."""
    module, x = nn.Sequential(nn.Linear(4, 3), turned(Gain(gain, 3))), r(5, T, 4)
    with pytest.raises(RuntimeError, match=r"gain|Gain"):
        stacks_of_a_call(OURS, module, x, squares)


@ours
def test_own_rule_given_folded_samples_is_refused(gain: Callable[..., Tensor]) -> None:
    module = Run(lambda m, x: m.layer(x.flatten(0, 1)).unflatten(0, (5, 2)), layer=Gain(gain, 4))
    with pytest.raises(RuntimeError, match="gain was given 10 samples"):
        stacks_of_a_call(OURS, module, r(5, 2, 4), squares)


@ours
@pytest.mark.parametrize("B", [5, 1, 0])
def test_own_rule_in_a_checkpointed_region(gain: Callable[..., Tensor], B: int) -> None:
    module, x = nn.Sequential(nn.Linear(4, 3), recomputed(Gain(gain, 3)), nn.Linear(3, 2)), r(B, 2, 4)
    want = definition(squares(module(x)), module)
    assert_same(stacks_of_a_call(OURS, module, x, squares), want)


@ours
@pytest.mark.parametrize("B", [5, 1, 0])
def test_own_rule_in_a_shared_module(gain: Callable[..., Tensor], B: int) -> None:
    """One layer under two names."""
    layer, x = Gain(gain, 3), r(B, 4)
    weight, module = layer.weight, nn.Sequential(nn.Linear(4, 3), layer, nn.Tanh(), layer)
    want = definition(squares(module(x)), module)
    loss = squares(ps.call_for_per_sample_grads(module)(x)).sum()
    assert layer.weight is weight
    loss.backward()
    assert_same(taken(module), want)


@ours
def test_own_rule_reached_by_some_samples_only(gain: Callable[..., Tensor]) -> None:
    module, x = Gain(gain, 4), r(5, 4)
    want = definition(F.pad(squares(module(x))[1:3], (1, 2)), module)
    assert_same(stacks_of_a_call(OURS, module, x, lambda out: squares(out)[1:3]), want)


@ours
def test_own_rule_not_reached(gain: Callable[..., Tensor]) -> None:
    module = Run(lambda m, x: (m.a(x), m.layer(x)), a=nn.Linear(4, 3), layer=Gain(gain, 4))
    stacks = stacks_of_a_call(OURS, module, r(5, 4), lambda out: squares(out[0]))
    assert torch.equal(stacks["layer.weight"], torch.zeros(5, 4))


@ours
def test_own_rule_leaves_no_trace_when_inputs_alone_are_asked_for(gain: Callable[..., Tensor]) -> None:
    module, x = nets(gain)["between"], r(5, 4, grad=True)
    losses = squares(ps.call_for_per_sample_grads(module)(x))
    (dx,) = torch.autograd.grad(losses.sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(squares(module(x)).sum(), x)[0])
    assert all(getattr(p, "grad_sample", None) is None for p in module.parameters())
