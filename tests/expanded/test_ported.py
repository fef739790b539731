"""Programs written for PyTorch's private expanded weights run here when only their imports are changed.

Every function below that takes an ``api`` is such a program: ``api`` has the names that it imports, PyTorch's or ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import _expanded_weights, _per_sample_grad
from torch.nn.utils._expanded_weights import expanded_weights_impl, expanded_weights_utils
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import handle_torch_function, has_torch_function

import persample as ps
from tests.expanded.peer import Run, default_dtype, recomputed, taken
from tests.expanded.test_registry import registries_restored
from tests.reference import assert_same, definition

HELPERS = """
forward_helper is_batch_first maybe_scale_by_batch_size set_grad_sample_if_exists standard_kwargs
sum_over_all_but_batch_and_last_n unpack_expanded_weight_or_tensor
""".split()

PEER = SimpleNamespace(
    call_for_per_sample_grads=_per_sample_grad.call_for_per_sample_grads,
    ExpandedWeight=_expanded_weights.ExpandedWeight,
    implements_per_sample_grads=expanded_weights_impl.implements_per_sample_grads,
    **{name: getattr(expanded_weights_utils, name) for name in HELPERS},
)
OURS = SimpleNamespace(
    call_for_per_sample_grads=ps.call_for_per_sample_grads,
    ExpandedWeight=ps.expanded.ExpandedWeight,
    implements_per_sample_grads=ps.expanded.implements_per_sample_grads,
    **{name: getattr(ps.expanded, name) for name in HELPERS},
)
both = pytest.mark.parametrize("api", [pytest.param(PEER, id="peer"), pytest.param(OURS, id="ours")])
both_reductions = pytest.mark.parametrize("reduction", ["sum", "mean"])


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


def squares(out: Tensor, dim: int = 0) -> Tensor:
    """Losses (B,)."""
    return out.square().movedim(dim, 0).flatten(1).sum(1) if out.ndim > 1 else out.square()


def total(losses: Tensor, reduction: str) -> Tensor:
    return losses.sum() if reduction == "sum" else losses.mean()


# --- modules ---------------------------------------------------------------------------------------------------------


def recurrent(dim: int) -> Callable[[Any], Tensor]:
    """Losses of outputs with the samples in ``dim``, and of the last states."""

    def losses(result: Any) -> Tensor:
        out, states = result
        states = states if isinstance(states, tuple) else (states,)
        return squares(out, dim) + sum(squares(state, 1) for state in states)

    return losses


class Packed(nn.Module):
    """A recurrent layer on sequences of different lengths, the longest first; its padded outputs and last state."""

    def __init__(self, rnn: nn.Module, lengths: list[int]) -> None:
        super().__init__()
        self.rnn, self.lengths = rnn, lengths

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        packed, state = self.rnn(pack_padded_sequence(x, self.lengths, batch_first=True))
        return pad_packed_sequence(packed, batch_first=True)[0], state


r = torch.randn
Layer = tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[Any], Tensor], dict[str, Any]]
LAYERS: dict[str, Layer] = {
    "linear": (lambda: nn.Linear(4, 3), lambda: r(5, 4), squares, {}),
    "linear-3d": (lambda: nn.Linear(4, 3, bias=False), lambda: r(5, 2, 4), squares, {}),
    "conv1d": (lambda: nn.Conv1d(4, 2, 3, padding="same", groups=2), lambda: r(5, 4, 7), squares, {}),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), lambda: r(5, 2, 6, 5), squares, {}),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2, dilation=2), lambda: r(5, 1, 4, 3, 4), squares, {}),
    "embedding": (lambda: nn.Embedding(6, 3), lambda: torch.randint(0, 6, (5, 4)), squares, {}),
    "layer_norm": (lambda: nn.LayerNorm([3, 4]), lambda: r(5, 2, 3, 4), squares, {}),
    "group_norm": (lambda: nn.GroupNorm(2, 4), lambda: r(5, 4, 3), squares, {}),
    "instance_norm": (lambda: nn.InstanceNorm2d(3, affine=True), lambda: r(5, 3, 4, 2), squares, {}),
    "gru": (lambda: nn.GRU(3, 2, batch_first=True), lambda: r(5, 4, 3), recurrent(0), {}),
    "gru-deep": (lambda: nn.GRU(3, 2, 2, bidirectional=True), lambda: r(4, 5, 3), recurrent(1), {"batch_first": False}),
    "rnn": (lambda: nn.RNN(3, 2, 2, batch_first=True), lambda: r(5, 4, 3), recurrent(0), {}),
    "rnn-relu": (lambda: nn.RNN(3, 2, nonlinearity="relu", batch_first=True), lambda: r(5, 4, 3), recurrent(0), {}),
    "rnn-packed": (lambda: Packed(nn.RNN(3, 2), [4, 3, 3, 2, 1]), lambda: r(5, 4, 3), recurrent(0), {}),
    "gru-packed": (lambda: Packed(nn.GRU(3, 2, 2), [4, 3, 3, 2, 1]), lambda: r(5, 4, 3), recurrent(0), {}),
    "lstm": (lambda: nn.LSTM(3, 2, 2, batch_first=True), lambda: r(5, 4, 3), recurrent(0), {}),
}


def stacks_of_a_call(
    api: Any, module: nn.Module, x: Tensor, losses: Callable[[Any], Tensor], **options: Any
) -> dict[str, Tensor]:
    loss = losses(api.call_for_per_sample_grads(module, **options)(x))
    total(loss, options.get("loss_reduction", "sum")).backward()
    return taken(module)


@both
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("options", [{}, {"batch_size": 5, "loss_reduction": "mean"}], ids=["plain", "options"])
def test_layers(api: Any, name: str, options: dict[str, Any]) -> None:
    make, data, losses, given = LAYERS[name]
    module, x = make(), data()
    want = definition(losses(module(x)), module)
    assert_same(stacks_of_a_call(api, module, x, losses, **given, **options), want)


# --- weights built by hand -------------------------------------------------------------------------------------------

Function = Callable[..., Tensor]
BY_HAND: dict[str, tuple[Function, list[tuple[int, ...]], Callable[[], Tensor]]] = {
    "linear": (F.linear, [(3, 4), (3,)], lambda: r(5, 4)),
    "linear-kwargs": (lambda x, w, b: F.linear(x, w, bias=b), [(3, 4), (3,)], lambda: r(5, 2, 4)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, bias=b, stride=2), [(3, 2, 2, 2), (3,)], lambda: r(5, 2, 5, 4)),
    "embedding": (F.embedding, [(6, 3)], lambda: torch.randint(0, 6, (5, 4))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [(4,), (4,)], lambda: r(5, 2, 4)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, weight=w, bias=b), [(4,), (4,)], lambda: r(5, 4, 3)),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), [(4,), (4,)], lambda: r(5, 4, 3)),
}


def stacks_by_hand(api: Any, fn: Function, x: Tensor, weights: list[Tensor], reduction: str) -> list[Tensor]:
    out = fn(x, *[api.ExpandedWeight(w, len(x), reduction) for w in weights])
    total(squares(out), reduction).backward()
    assert all(w.grad is None for w in weights)
    return [w.grad_sample for w in weights]


@both
@both_reductions
@pytest.mark.parametrize("name", BY_HAND)
def test_weights_built_by_hand(api: Any, name: str, reduction: str) -> None:
    fn, shapes, data = BY_HAND[name]
    weights, x = [r(*shape, requires_grad=True) for shape in shapes], data()
    want = definition(squares(fn(x, *weights)), weights)
    assert_same(stacks_by_hand(api, fn, x, weights, reduction), want)


@both
@both_reductions
@pytest.mark.parametrize("name", LAYERS)
def test_modules_filled_by_hand(api: Any, name: str, reduction: str) -> None:
    make, data, losses, _ = LAYERS[name]
    module, x = make(), data()
    weights = {n: api.ExpandedWeight(p, 5, reduction) for n, p in module.named_parameters()}
    total(losses(functional_call(module, weights, (x,))), reduction).backward()
    assert_same(taken(module), definition(losses(module(x)), module))


@both
@both_reductions
def test_layers_filled_by_hand(api: Any, reduction: str) -> None:
    module, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 2)), r(5, 4, requires_grad=True)
    weights = {name: api.ExpandedWeight(p, 5, reduction) for name, p in module.named_parameters()}
    total(squares(functional_call(module, weights, (x,))), reduction).backward()
    plain = squares(module(x))
    assert_same(taken(module), definition(plain, module))
    torch.testing.assert_close(x.grad, torch.autograd.grad(total(plain, reduction), x)[0])


@both
def test_attributes(api: Any) -> None:
    w = nn.Parameter(r(3, 4))
    ew = api.ExpandedWeight(w, 5, "mean")
    assert isinstance(ew, torch.Tensor)
    assert (ew.batch_size, ew.batch_first, ew.allow_smaller_batches, ew.loss_reduction) == (5, True, False, "mean")
    assert ew.orig_weight is w
    assert (ew.shape, ew.dtype, ew.device, ew.is_cuda) == (w.shape, w.dtype, w.device, False)
    assert (ew.data_ptr(), ew.get_device()) == (w.data_ptr(), w.get_device())
    assert torch.equal(ew.data, w.data)
    assert type(ew.data) is torch.Tensor
    assert ew.data.data_ptr() == w.data_ptr()
    assert F.linear in type(ew).handled_functions
    ew.set_batch_first(False)
    ew.set_allow_smaller_batches(True)
    assert (ew.batch_first, ew.allow_smaller_batches) == (False, True)
    ew.set_batch_first()
    assert ew.batch_first is True


@both
@pytest.mark.parametrize("wrong", [None, 3.0, [1.0]], ids=repr)
def test_what_is_no_tensor_is_refused(api: Any, wrong: Any) -> None:
    with pytest.raises(RuntimeError, match=type(wrong).__name__):
        api.ExpandedWeight(wrong, 5, "sum")


@both
def test_what_needs_no_gradient_is_refused(api: Any) -> None:
    with pytest.raises(RuntimeError, match=r"requires.grad"):
        api.ExpandedWeight(r(3), 5, "sum")


# --- private training ------------------------------------------------------------------------------------------------


def train(api: Any, module: nn.Module, batches: list[tuple[Tensor, Tensor]], wrap_once: bool) -> None:
    """Clip each sample's gradient to norm 1, and step along the mean."""
    params = list(module.parameters())
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    call = api.call_for_per_sample_grads(module, loss_reduction="mean") if wrap_once else None
    for x, y in batches:
        forward = call or api.call_for_per_sample_grads(module, batch_size=len(x), loss_reduction="mean")
        F.cross_entropy(forward(x), y).backward()
        clip_and_average(params, [p.grad_sample for p in params])
        for p in params:
            p.grad_sample = None
        optimizer.step()
        optimizer.zero_grad()


def clip_and_average(params: list[nn.Parameter], stacks: list[Tensor]) -> None:
    norms = torch.stack([stack.flatten(1).norm(2, dim=1) for stack in stacks]).norm(2, dim=0)
    factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for p, stack in zip(params, stacks, strict=True):
        p.grad = torch.einsum("n,n...->...", factors, stack) / len(factors)


def train_by_definition(module: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    params = list(module.parameters())
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    for x, y in batches:
        stacks = definition(F.cross_entropy(module(x), y, reduction="none"), module)
        clip_and_average(params, list(stacks.values()))
        optimizer.step()
        optimizer.zero_grad()


@both
@pytest.mark.parametrize("wrap_once", [True, False], ids=["wrapped-once", "wrapped-every-step"])
def test_private_training(api: Any, wrap_once: bool) -> None:
    batches = [(r(n, 2, 6, 6), torch.randint(0, 3, (n,))) for n in (5, 5, 3, 1)]
    made = []
    for run in (lambda m: train(api, m, batches, wrap_once), lambda m: train_by_definition(m, batches)):
        torch.manual_seed(1)
        module = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        )
        run(module)
        made.append({name: p.detach() for name, p in module.named_parameters()})
    assert_same(made[0], made[1])


# --- a rule of one's own ---------------------------------------------------------------------------------------------


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
def gain(api: Any) -> Iterator[Callable[..., Tensor]]:
    with registries_restored():
        yield third_party(api)


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
    module, x = nets(gain)[name], r(B, 2, 4, requires_grad=True)
    losses = squares(module(x))
    want, (dx,) = definition(losses, module), torch.autograd.grad(losses.sum(), x)
    assert_same(stacks_of_a_call(api, module, x, squares, loss_reduction=reduction), want)
    torch.testing.assert_close(x.grad, dx if reduction == "sum" else dx / max(B, 1))


@at_sizes
@both_reductions
@pytest.mark.parametrize("dim", [0, 1], ids=["batch-first", "batch-second"])
def test_own_rule_by_hand(api: Any, B: int, gain: Callable[..., Tensor], reduction: str, dim: int) -> None:
    weights = [(torch.rand(4) + 1).requires_grad_(), r(4, requires_grad=True)]
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
        gain(r(4, 3), api.ExpandedWeight(r(3, requires_grad=True), 5, "sum"))


@both
def test_own_rule_refuses_a_plain_parameter(api: Any, gain: Callable[..., Tensor]) -> None:
    w, b = r(3, requires_grad=True), r(3, requires_grad=True)
    out = gain(r(5, 3), api.ExpandedWeight(w, 5, "sum"), b)
    with pytest.raises(RuntimeError, match=r"plain|normal"):
        out.sum().backward()


@pytest.mark.parametrize("api", [OURS], ids=["ours"])
@both_reductions
@pytest.mark.parametrize("B", [5, 1, 0])
@pytest.mark.parametrize("name", NETS)
def test_own_rule_feeds_reductions(gain: Callable[..., Tensor], name: str, B: int, reduction: str) -> None:
    module, x = nets(gain)[name], r(B, 2, 4)
    losses = squares(module(x))
    stacks = definition(losses, module)
    call = ps.call_for_per_sample_grads(
        module, loss_reduction=reduction, reductions=[ps.Norms(), ps.ClippedSum(1.0)], batch_size=None
    )
    total(squares(call(x)), reduction).backward()
    norms, clipped = call.results()
    want = torch.stack([stack.flatten(1).norm(dim=1) for stack in stacks.values()]).norm(dim=0)
    assert_same([norms[:, None]], {"0": want[:, None]})
    factors = (1 / want).clamp(max=1)
    sums = {n: torch.einsum("n,n...->...", factors, stack)[None] for n, stack in stacks.items()}
    assert_same({n: clipped[n][None] for n in sums}, sums)
    assert all(getattr(p, "grad_sample", None) is None and p.grad is None for p in module.parameters())


@both
def test_helpers(api: Any) -> None:
    w = r(2, 3, requires_grad=True)
    ew = api.ExpandedWeight(w, 5, "mean")
    assert api.standard_kwargs(("b", "c"), (1, 2, 3, 4)) == ((1, 2), {"b": 3, "c": 4})
    assert api.standard_kwargs((), (1, 2)) == ((1, 2), {})
    assert api.is_batch_first([ew, 3, r(2)]) is True
    assert api.is_batch_first([r(2)]) is None
    stack = r(5, 2, 3)
    assert torch.equal(api.maybe_scale_by_batch_size(stack, ew), stack * 5)
    assert api.maybe_scale_by_batch_size(stack, api.ExpandedWeight(w, 5, "sum")) is stack
    assert torch.equal(api.unpack_expanded_weight_or_tensor(ew, lambda t: t * 2), w * 2)
    assert api.unpack_expanded_weight_or_tensor(ew) is w
    assert api.unpack_expanded_weight_or_tensor(stack) is stack
    assert api.unpack_expanded_weight_or_tensor(None) is None
    with pytest.raises(RuntimeError, match=r"plain|normal"):
        api.unpack_expanded_weight_or_tensor(w)
    deep = r(5, 4, 6, 2, 3)
    torch.testing.assert_close(api.sum_over_all_but_batch_and_last_n(deep, 2), deep.sum((1, 2)))
    torch.testing.assert_close(api.sum_over_all_but_batch_and_last_n(stack, 2), stack)
    api.set_grad_sample_if_exists(stack, lambda t: pytest.fail("no weight"))
    api.set_grad_sample_if_exists(ew, lambda t: stack)
    api.set_grad_sample_if_exists(ew, lambda t: stack)
    torch.testing.assert_close(w.grad_sample, stack * 10)


# --- beyond the peer -------------------------------------------------------------------------------------------------

ours = pytest.mark.parametrize("api", [OURS], ids=["ours"])


def turned(layer: nn.Module) -> nn.Module:
    """A layer that is given the samples in dim 1."""
    return Run(lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1), layer=layer)


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
    module, x = nets(gain)["between"], r(5, 4, requires_grad=True)
    losses = squares(ps.call_for_per_sample_grads(module)(x))
    (dx,) = torch.autograd.grad(losses.sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(squares(module(x)).sum(), x)[0])
    assert all(getattr(p, "grad_sample", None) is None for p in module.parameters())
