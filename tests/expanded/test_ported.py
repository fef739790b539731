"""Programs written for PyTorch's private expanded weights run here when only their imports are changed.

Every function that takes an ``api`` is such a program: ``api`` has the names that it imports, PyTorch's or ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.expanded.helpers import both_reductions, ids, r, squares, taken, total
from tests.expanded.ported import both, stacks_of_a_call
from tests.reference import assert_same, definition

pytestmark = pytest.mark.usefixtures("float64")


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


Layer = tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[Any], Tensor], dict[str, Any]]
LAYERS: dict[str, Layer] = {
    "linear": (lambda: nn.Linear(4, 3), lambda: r(5, 4), squares, {}),
    "linear-3d": (lambda: nn.Linear(4, 3, bias=False), lambda: r(5, 2, 4), squares, {}),
    "conv1d": (lambda: nn.Conv1d(4, 2, 3, padding="same", groups=2), lambda: r(5, 4, 7), squares, {}),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), lambda: r(5, 2, 6, 5), squares, {}),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2, dilation=2), lambda: r(5, 1, 4, 3, 4), squares, {}),
    "embedding": (lambda: nn.Embedding(6, 3), lambda: ids(5, 4), squares, {}),
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
    "embedding": (F.embedding, [(6, 3)], lambda: ids(5, 4)),
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
    weights, x = [r(*shape, grad=True) for shape in shapes], data()
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
    module, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 2)), r(5, 4, grad=True)
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


@both
def test_helpers(api: Any) -> None:
    w = r(2, 3, grad=True)
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
