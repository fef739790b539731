"""Changes in place between the forward and `persample.grad`: PyTorch's error, never wrong numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample as ps
from tests.case_library.functions import OwnLinear
from tests.models import mlp
from tests.reference import assert_same, definition, vectors

VERSION = "modified by an inplace operation"


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_an_optimizer_step_after_the_forward_is_noticed() -> None:
    model, x = mlp(), noise(5, 3)
    model(x).sum().backward()
    losses = model(x).square().sum(1)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=VERSION):
        ps.grad(losses, model)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_steps_after_the_call_are_harmless(optimizer: type[torch.optim.Optimizer]) -> None:
    model, x = mlp(), noise(5, 3)
    step = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    for _ in range(3):
        losses = model(x).square().sum(1)
        got, want = ps.grad(losses, model), definition(model(x).square().sum(1), model)
        for name, p in model.named_parameters():
            p.grad = got[name].sum(0)
        step.step()
        assert_same(got, want)  # the results do not share memory with what the step changed


LATER: dict[str, Callable[[Tensor, nn.Module], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w.matrix),
    "matmul": lambda x, w: x @ w.matrix.t(),
    "bmm": lambda x, w: torch.bmm(x.unsqueeze(0), w.matrix.t().unsqueeze(0))[0],
    "product": lambda x, w: x * w.vector,
    "quotient": lambda x, w: x / w.vector,
    "convolution": lambda x, w: F.conv1d(x.unsqueeze(1), w.kernel).flatten(1),
    "layer norm": lambda x, w: F.layer_norm(x, (3,), w.vector, w.vector),
    "group norm": lambda x, w: F.group_norm(x, 1, w.vector),
    "prelu": lambda x, w: F.prelu(x, w.vector),
    "bilinear": lambda x, w: F.bilinear(x, x, w.cube),
    "einsum": lambda x, w: torch.einsum("bi,ij->bj", x, w.matrix),
    "attention": lambda x, w: F.scaled_dot_product_attention(
        x.view(-1, 1, 1, 3), w.matrix.expand(len(x), 1, 3, 3), w.matrix.expand(len(x), 1, 3, 3)
    ),
}


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.rand(3) + 1)
        self.kernel, self.cube = nn.Parameter(torch.randn(2, 1, 2)), nn.Parameter(torch.randn(3, 3, 3))


@pytest.mark.parametrize("op", LATER.values(), ids=LATER)
def test_an_input_changed_after_the_forward_is_noticed(op: Callable[[Tensor, nn.Module], Tensor]) -> None:
    """The rules read the saved input themselves; an ordinary backward would have complained."""
    torch.manual_seed(0)
    weights, x = Weights().double(), torch.randn(5, 3).double()
    losses = op(x, weights).flatten(1).sum(1)
    x += 1
    with pytest.raises(RuntimeError, match=VERSION):
        torch.autograd.grad(losses.sum(), list(weights.parameters()), allow_unused=True, retain_graph=True)
    with pytest.raises(RuntimeError, match=VERSION):
        ps.grad(losses, weights)


@pytest.mark.parametrize("op", LATER.values(), ids=LATER)
def test_a_weight_changed_after_the_forward_is_noticed(op: Callable[[Tensor, nn.Module], Tensor]) -> None:
    """A layer lies below, so that the backward needs the weight."""
    torch.manual_seed(0)
    weights, first, x = Weights().double(), nn.Linear(3, 3).double(), torch.randn(5, 3).double()
    losses = op(first(x).tanh(), weights).flatten(1).sum(1)
    with torch.no_grad():
        for p in weights.parameters():
            p.mul_(2)
    for params in ([first.weight], [*first.parameters(), *weights.parameters()]):
        with pytest.raises(RuntimeError, match=VERSION):
            torch.autograd.grad(losses.sum(), params, allow_unused=True, retain_graph=True)
        with pytest.raises(RuntimeError, match=VERSION):
            ps.grad(losses, params, retain_graph=True)


def test_an_activation_changed_after_the_forward_is_noticed() -> None:
    model, x = mlp(), noise(5, 3)
    h = model[0](x).exp()
    losses = model[2](h).square().sum(1)
    h.mul_(2)
    with pytest.raises(RuntimeError, match=VERSION):
        ps.grad(losses, model)


def test_routing_indices_changed_after_the_forward_are_noticed() -> None:
    """Where samples lie is read from the saved index: it must not be read after a change."""
    model, x = mlp(), noise(5, 3)
    order = torch.tensor([4, 2, 0, 1, 3])
    losses = model(x)[order].square().sum(1)
    order += torch.tensor([-4, 0, 4, 0, 0])
    with pytest.raises(RuntimeError, match=VERSION):
        ps.grad(losses, model)


def test_embedding_ids_changed_after_the_forward_are_noticed() -> None:
    torch.manual_seed(0)
    table, ids = nn.Embedding(6, 3), torch.arange(5)
    losses = table(ids).square().sum(1)
    ids += 1
    with pytest.raises(RuntimeError, match=VERSION):
        ps.grad(losses, table)


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_a_change_inside_a_custom_function_is_noticed() -> None:
    w, b, x = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4)), torch.randn(5, 3)
    losses = OwnLinear.apply(x, w, b).square().sum(1)
    x.zero_()
    with pytest.raises(RuntimeError, match=VERSION):
        ps.grad(losses, [w, b])


def test_a_change_that_no_backward_needs_is_none_of_our_business() -> None:
    model, x = mlp(), noise(5, 3)
    losses = model(x).square().sum(1)
    want = definition(losses, model)
    with torch.no_grad():
        model[0].weight.mul_(2)  # nothing trainable lies below the first layer
        model[2].bias.add_(1)
    assert_same(ps.grad(losses, model), want)


def test_the_inputs_version_is_not_moved() -> None:
    """`persample.grad` itself must not look like a change in place to whoever comes next."""
    model, x = mlp(), noise(5, 3)
    losses = model(x).square().sum(1)
    before = x._version, losses._version, [p._version for p in model.parameters()]
    ps.grad(losses, model, retain_graph=True)
    assert (x._version, losses._version, [p._version for p in model.parameters()]) == before
    losses.sum().backward()


class Reversed(torch.autograd.Function):
    """Turns gradients around, in the memory of the cotangent, which others have too."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0].neg_()


def turned_around(weights: list[Tensor]) -> Tensor:
    h = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double() @ weights[0]).tanh()
    for w in weights[1:]:
        h = Reversed.apply(h) + h.tanh() @ w
    return h.square().mean(1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ask", [ps.grad, ps.norms, lambda losses, w: ps.clipped_sum(losses, w, max_norm=0.1)])
@pytest.mark.parametrize("layers", [2, 5])
def test_a_cotangent_that_changes_during_the_backward(layers: int, ask: Callable[..., object], tied: bool) -> None:
    """Right, or refused: what was made from it may have been used already."""
    torch.manual_seed(0)
    first, *others = [torch.randn(4, 4).double().requires_grad_() for _ in range(layers)]
    weights = [first, *[others[0]] * len(others)] if tied else [first, *others]
    params = list(dict.fromkeys(weights))
    want = definition(turned_around(weights), params)
    every = vectors(want).norm(dim=1)
    clipped = [torch.tensordot((0.1 / every).clamp(max=1), stack, 1) for stack in want.values()]
    try:
        found = ask(turned_around(weights), params)
    except ps.UnsupportedError:
        return
    expected = {ps.grad: list(want.values()), ps.norms: [every]}.get(ask, clipped)
    for mine, right in zip(found if isinstance(found, tuple) else [found], expected, strict=True):
        torch.testing.assert_close(mine, right)


def test_gradients_that_are_written_at_once_are_right() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(4, 4).double().requires_grad_() for _ in range(5)]
    want = definition(turned_around(weights), weights)
    assert_same(ps.grad(turned_around(weights), weights), want)


def test_a_kept_cotangent_that_changes_is_refused() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(4, 4).double().requires_grad_() for _ in range(2)]
    with pytest.raises(ps.UnsupportedError, match="changed in place during the backward"):
        ps.clipped_sum(turned_around(weights), weights, max_norm=0.1)


def pair(hook: str, order: int) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """Two weights whose products are added: the sum's backward hands one tensor to both."""
    torch.manual_seed(0)
    x = torch.randn(3, 4).double()
    w, v = torch.randn(4, 2).double().requires_grad_(), torch.randn(4, 2).double().requires_grad_()

    def losses() -> Tensor:
        a, b = (x @ w, x @ v) if order else (x @ v, x @ w)[::-1]
        total = a + b
        if hook == "operand":
            a.register_hook(lambda g: g.mul_(2))
        elif hook == "function":
            total = Reversed.apply(a) + b
        elif hook == "view":
            a.register_hook(lambda g: None if g.view(-1)[:3].zero_() is None else g)
        elif hook == "sum":
            total.register_hook(lambda g: g.mul_(2))
        elif hook == "copy":
            a.register_hook(lambda g: g * 2)
        return total.tanh().sum(1)

    return [w, v], losses


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("hook", ["operand", "function", "view", "sum", "copy"])
def test_a_hook_that_changes_memory_of_others(hook: str, below: bool, order: int) -> None:
    """Nobody else's gradient changes with it, at the last layers that the engine stops at as well as in between."""
    params, losses = pair(hook, order)
    scale = nn.Parameter(torch.ones(3).double())  # in front of them, so that the engine passes them by

    def scaled() -> Tensor:
        return losses() * scale if below else losses()

    want = definition(scaled(), params)
    may_refuse = (ps.UnsupportedError,) if hook in ("operand", "function", "view") else ()
    try:
        found = ps.grad(scaled(), params)
    except may_refuse:
        return
    assert_same(found, want)


def test_the_refusal_says_what_to_do() -> None:
    params, losses = pair("operand", 1)
    with pytest.raises(ps.UnsupportedError, match=r"changed in place during the backward.*work on a copy"):
        ps.grad(losses(), params)


def test_a_hook_may_change_a_cotangent_that_nobody_else_has() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(3, 4).double(), torch.randn(4, 2).double().requires_grad_()

    def losses() -> Tensor:
        h = x @ w
        h.register_hook(lambda g: g.clamp_(-0.1, 0.1))
        return h.tanh().sum(1)

    assert_same(ps.grad(losses(), [w]), definition(losses(), [w]))
