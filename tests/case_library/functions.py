"""Custom autograd Functions, compiled models and other opaque nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, param, score


class Square(torch.autograd.Function):
    """Elementwise; its backward is linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g


class OwnLinear(torch.autograd.Function):
    """Takes its weights as inputs, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t() + b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2), g.flatten(0, -2).sum(0)


class TwoOutputs(torch.autograd.Function):
    """Two outputs, of which one may be unused; a number among the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.scale = scale
        return x * scale, x + scale

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, None]:
        return a * ctx.scale + b, None


def _changed(change: Callable[[Tensor], Tensor]) -> type[torch.autograd.Function]:
    """The identity, with a backward that changes the cotangent."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return change(g)

    return Changed


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "normalised": lambda g: g / (g.norm() + 1e-12),
    "sign": torch.sign,
    "clamped": lambda g: g.clamp(-0.2, 0.2),
    "cubed": lambda g: g**3,
    "rows-normalised": lambda g: g / (g.norm(dim=-1, keepdim=True) + 1e-12),
}


@case()
def function_elementwise(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3)
    return net, lambda: score(net[1](Square.apply(net[0](x))))


@case(batches=(4, 1), slow_path=True)
def function_of_a_parameter(B: int) -> Program:
    w, x = param(4), torch.randn(B, 4)
    return [w], lambda: score((x * Square.apply(w)).tanh())


@case({"2d": {"shape": ()}, "3d": {"shape": (5,)}}, slow_path=True)
def function_with_weights(B: int, shape: tuple[int, ...]) -> Program:
    w, b, x = param(4, 3), param(4), torch.randn(B, *shape, 3)
    return [w, b], lambda: score(OwnLinear.apply(x, w, b).tanh())


@case(slow_path=True)
def function_with_weights_twice(B: int) -> Program:
    net, w, b, x = nn.Linear(3, 3), param(3, 3), param(3), torch.randn(B, 3)
    params = {"w": w, "b": b, **dict(net.named_parameters())}
    return params, lambda: score(OwnLinear.apply(net(OwnLinear.apply(x, w, b).tanh()), w, b))


@case({"both": {"both": True}, "one": {"both": False}})
def function_with_two_outputs(B: int, both: bool) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B, 3)

    def losses() -> Tensor:
        a, b = TwoOutputs.apply(net(x).tanh(), 3.0)
        return score(a * b if both else a)

    return net, losses


@case({name: {"change": change} for name, change in CHANGES.items()}, slow_path=True)
def function_not_linear_backward(B: int, change: Callable[[Tensor], Tensor]) -> Program:
    net, x, op = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3), _changed(change)
    return net, lambda: score(net[1](op.apply(net[0](x).tanh())))


@case({name: {"change": change} for name, change in CHANGES.items()}, batches=(4, 1), slow_path=True)
def function_not_linear_backward_on_a_weight(B: int, change: Callable[[Tensor], Tensor]) -> Program:
    w, x, op = param(4, 3), torch.randn(B, 3), _changed(change)
    return [w], lambda: score(F.linear(x, op.apply(w)).tanh())


@case()
def function_reverses_gradients(B: int) -> Program:
    net, x, op = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3), _changed(torch.neg)
    return net, lambda: score(net[1](op.apply(net[0](x).tanh()))) + score(net[0](x))


@case()
def function_straight_through(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3)

    def losses() -> Tensor:
        h = net[0](x).tanh()
        return score(net[1](h + (h.round() - h).detach()))

    return net, losses


@case(batches=(4,), interacts=True)
def function_mixing_samples(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B, 3)
    op = _changed(lambda g: g + 0.5 * g.flip(0))
    return net, lambda: score(op.apply(net(x)).tanh())


@case(batches=(4, 1), slow_path=True)
def function_hook_on_an_activation(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3)

    def losses() -> Tensor:
        h = net[0](x).tanh()
        h.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return score(net[1](h))

    return net, losses


@case(batches=(4, 1), slow_path=True, nodes=("CompiledFunctionBackward",))
def compiled_model(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(B, 3)
    run = torch.compile(net, backend="aot_eager")
    return net, lambda: score(run(x))


@case(batches=(4, 1), slow_path=True)
def compiled_block_between_layers(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 2)]), torch.randn(B, 5, 3)
    run = torch.compile(lambda h: net[1](h.mT).mT.relu(), backend="aot_eager")
    return net, lambda: score(net[2](run(net[0](x))))
