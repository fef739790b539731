"""Custom autograd Functions in the ways people write them: exact, or their own error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import persample as ps
from tests.reference import Params, assert_same, definition

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")]
Program = tuple[Params, Callable[[], Tensor]]
PROGRAMS: list[Callable[[int], Program]] = []


def program(fn: Callable[[int], Program]) -> Callable[[int], Program]:
    PROGRAMS.append(fn)
    return fn


def layers() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)])


class Unmaterialised(torch.autograd.Function):
    """Two outputs; the cotangent of an unused one arrives as None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return x * w, x - w

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        if a is None:
            return b, None if b is None else -b.sum(0)
        dx, dw = a * w, (a * x).sum(0)
        return (dx, dw) if b is None else (dx + b, dw - b.sum(0))


def one_of_two(B: int, which: int) -> Program:
    net, w, x = layers(), nn.Parameter(torch.randn(4)), torch.randn(B, 3)
    params = {"w": w, **dict(net.named_parameters())}
    return params, lambda: net[1](Unmaterialised.apply(net[0](x), w)[which].tanh()).square().sum(1)


@program
def unmaterialised_first(B: int) -> Program:
    return one_of_two(B, 0)


@program
def unmaterialised_second(B: int) -> Program:
    return one_of_two(B, 1)


@program
def unmaterialised_both(B: int) -> Program:
    net, w, x = layers(), nn.Parameter(torch.randn(4)), torch.randn(B, 3)
    params = {"w": w, **dict(net.named_parameters())}

    def losses() -> Tensor:
        a, b = Unmaterialised.apply(net[0](x), w)
        return net[1](a.tanh() * b.cos()).square().sum(1)

    return params, losses


class OnlyUnmaterialised(torch.autograd.Function):
    """Fails when it is given zeros in place of None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Tensor:
        if b is not None:
            raise AssertionError("nobody used the second output")
        assert a is not None
        return 2 * a


@program
def none_is_passed_on_as_none(B: int) -> Program:
    net, x = layers(), torch.randn(B, 3)
    return net, lambda: net[1](OnlyUnmaterialised.apply(net[0](x))[0]).square().sum(1)


class LargestAndWhere(torch.autograd.Function):
    """An output without gradient among the outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, where = x.max(1)
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(where)
        ctx.shape = x.shape
        return values, where

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Tensor:
        return g.new_zeros(ctx.shape).scatter(1, ctx.saved_tensors[0][:, None], g[:, None])


@program
def non_differentiable_output(B: int) -> Program:
    net, x = layers(), torch.randn(B, 3)

    def losses() -> Tensor:
        values, where = LargestAndWhere.apply(net[0](x))
        return values.square() + net[1](net[0](x)).sum(1) * where

    return net, losses


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


@program
def once_differentiable_backward(B: int) -> Program:
    net, w, x = layers(), nn.Parameter(torch.randn(4, 4)), torch.randn(B, 3)
    params = {"w": w, **dict(net.named_parameters())}
    return params, lambda: net[1](OnceOnly.apply(net[0](x), w).tanh()).square().sum(1)


class Interleaved(torch.autograd.Function):
    """Numbers, None, strings, tensors without gradient and unused tensors between those that count."""

    @staticmethod
    def forward(
        ctx: Any, scale: float, x: Tensor, mode: str, mask: Tensor, nothing: None, w: Tensor, unused: Tensor
    ) -> Tensor:
        assert (mode, nothing) == ("plus", None)
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return scale * x * mask + w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return None, ctx.scale * g * ctx.saved_tensors[0], None, None, None, g.sum(0), None


@program
def arguments_interleaved(B: int) -> Program:
    net, w, spare = layers(), nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2))
    x, mask = torch.randn(B, 3), torch.rand(B, 4)
    params = {"w": w, "spare": spare, **dict(net.named_parameters())}
    return (
        params,
        lambda: net[1](Interleaved.apply(2.0, net[0](x), "plus", mask, None, w, spare).tanh()).square().sum(1),
    )


@program
def arguments_frozen(B: int) -> Program:
    net, w, x, mask = layers(), torch.randn(4), torch.randn(B, 3), torch.rand(B, 4)
    return net, lambda: net[1](Interleaved.apply(2.0, net[0](x), "plus", mask, None, w, w)).square().sum(1)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3.0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


@program
def in_place_function(B: int) -> Program:
    net, x = layers(), torch.randn(B, 3)
    return net, lambda: net[1](InPlace.apply(net[0](x) + 1)).square().sum(1)


class WithSetup(torch.autograd.Function):
    """The other way to write one; it keeps its tensors on ctx itself."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.x, ctx.w = (t.detach() for t in inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        wants_x, wants_w = ctx.needs_input_grad
        return g * ctx.w if wants_x else None, (g * ctx.x).sum(0) if wants_w else None


@program
def setup_context_and_needs_input_grad(B: int) -> Program:
    w, x = nn.Parameter(torch.randn(3)), torch.randn(B, 3)
    return [w], lambda: WithSetup.apply(WithSetup.apply(x, w).tanh(), w).square().sum(1)


class Nested(torch.autograd.Function):
    """Runs autograd inside its backward, as hand-written checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x * w).tanh()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = (x * w).tanh()
        return torch.autograd.grad(y, (x, w), g)  # type: ignore[return-value]


@program
def autograd_inside_a_backward(B: int) -> Program:
    net, w, x = layers(), nn.Parameter(torch.randn(4)), torch.randn(B, 3)
    params = {"w": w, **dict(net.named_parameters())}
    return params, lambda: net[1](Nested.apply(net[0](x), w)).square().sum(1)


@pytest.mark.parametrize("B", [1, 2, 5])
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_custom_functions_are_exact(make: Callable[[int], Program], B: int) -> None:
    params, forward = make(B)
    losses, want = forward(), definition(forward(), params)
    assert any(bool(g.any()) for g in want.values())
    assert_same(ps.grad(losses, params, retain_graph=True), want)
    assert_same(ps.grad(losses, params), want)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise KeyError("no backward today")


@pytest.mark.parametrize("B", [1, 4])
def test_a_functions_own_error_comes_through(B: int) -> None:
    net, x = layers(), torch.randn(B, 3)
    for losses in (net[1](Broken.apply(net[0](x))).sum(1), (net[0](x) * Broken.apply(net[0].bias)).sum(1)):
        with pytest.raises(KeyError, match="no backward today"):
            ps.grad(losses, net)


@pytest.mark.parametrize("B", [1, 4])
def test_saved_tensors_that_were_freed_are_named(B: int) -> None:
    w, x = nn.Parameter(torch.randn(3, 3)), torch.randn(B, 3)
    losses = OnceOnly.apply(OnceOnly.apply(x, w).tanh(), w).sum(1)
    ps.grad(losses, [w])
    with pytest.raises(RuntimeError, match=r"was freed by an earlier backward: .*retain_graph=True"):
        ps.grad(losses, [w])


def test_a_backward_runs_once_per_sample_and_not_much_more() -> None:
    """The gradient of its weight takes B calls, not B for every question that is asked."""
    calls = []

    class Counting(OnceOnly):
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            calls.append(tuple(g.shape))
            return OnceOnly.backward(ctx, g)

    w, x = nn.Parameter(torch.randn(3, 3)), torch.randn(6, 3)
    ps.grad(Counting.apply(x, w).square().sum(1), [w])
    assert len(calls) <= 6 + 3


def function(backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The identity with this backward."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return backward(grads[0])

    apply: Callable[[Tensor], Tensor] = Own.apply  # type: ignore[assignment]
    return apply


BACKWARDS: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {  # and whether they keep samples apart
    "clipped": (True, lambda g: g.clamp(-0.1, 0.1)),
    "signs": (True, lambda g: g.sign()),
    "rows of length one": (True, lambda g: g / g.norm(dim=1, keepdim=True).clamp_min(1e-30)),
    "length one": (False, lambda g: g / g.norm()),
    "dead zone": (False, lambda g: torch.where(g.abs() < 1e-3 * g.abs().amax(), 0.0, g)),
    "quantised": (False, lambda g: (g / (s := 2 ** g.abs().amax().log2().floor() / 8)).round() * s),
    "only in company": (False, lambda g: g if (g != 0).any(1).sum() > 1 else g * 0),
}


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("B", [2, 4, 8, 17])
@pytest.mark.parametrize("name", BACKWARDS)
def test_backwards_that_are_not_linear(name: str, B: int) -> None:
    """The definition is one sample alone: not half of them, nor all."""
    torch.manual_seed(B)
    apart, backward = BACKWARDS[name]
    x, w, scale = torch.randn(B, 4).double(), nn.Parameter(torch.randn(4, 4).double()), torch.rand(B).double()
    scale[B // 2] = 1e-6
    losses = lambda: function(backward)(x @ w).sum(1) * scale  # noqa: E731
    assert_same(ps.grad(losses(), [w]), definition(losses(), [w]))
    if apart:
        ps.norms(losses(), [w], independent=True)
    else:
        with pytest.raises(ps.InteractionError, match="samples interact in custom Own"):
            ps.norms(losses(), [w], independent=True)
