"""What random programs are written in besides PyTorch. A printed program carries the text of what it uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

POKE: dict[str, float] = {}  # while one element of the data is different: of which tensor, where, and tensors so far
BAD: dict[str, float] = {}  # while one sample's data are spoilt: which sample's, and what they become
NOISE: list[float] = []  # how much all numbers are changed, relative to themselves, to see what rounding does
REPLAY: dict[str, Any] = {}  # while a program runs as a module: what its weights, modules and data are taken from


def replayed(kind: str, made: Any) -> Any:
    """What a module has in place of what a program made; noted, if a module is to be made of it."""
    if REPLAY.get("notes") is not None:
        REPLAY["notes"][kind].append(made)
    elif REPLAY:
        return next(REPLAY[kind])
    return made


def draw(*shape: int) -> Tensor:
    """The same numbers in every dtype."""
    x = torch.randn(shape, dtype=torch.float64)
    if NOISE:
        x *= 1 + NOISE[0] * torch.sin(1000 * x)
    return x.to(torch.get_default_dtype())


def weight(*shape: int) -> Tensor:
    """A parameter."""
    return replayed("weights", nn.Parameter(draw(*shape) * 0.6))


def complex_weight(*shape: int) -> Tensor:
    """A complex parameter."""
    return replayed("weights", nn.Parameter(torch.complex(draw(*shape), draw(*shape)) * 0.6))


def fresh(module: nn.Module) -> Any:
    """A module whose parameters are the same numbers in every dtype."""
    for p in module.parameters():
        p.data.copy_(draw(*p.shape) * 0.5)
    return replayed("modules", module)


def data(*shape: int, batch: int = 0) -> Tensor:
    """Data of the samples, which lie along one dim."""
    x = draw(*shape)
    if BAD:
        x.select(batch, int(BAD["sample"])).fill_(BAD["value"])
    if poked(x):
        x.view(-1)[int(POKE["place"] * x.numel())] += 1e-5
    return replayed("data", x)


def ids(*shape: int, high: int, batch: int = 0) -> Tensor:
    """Whole numbers below `high` for every sample, along one dim."""
    return replayed("data", torch.randint(high, shape))


def poked(x: Tensor) -> bool:
    """Whether it is this tensor of which an element is to be different."""
    if not POKE:
        return False
    POKE["seen"] += 1
    return POKE["seen"] == POKE["tensor"] and x.numel() > 0


def samples(h: Tensor, batch: int, at: int, inner: int) -> Tensor:
    """The sample of every element, if samples lie along one dim, `inner` places in a row."""
    line = torch.arange(h.shape[at]) // inner % max(batch, 1)
    return line.view([-1 if d == at else 1 for d in range(h.ndim)]).expand(h.shape)


def resized(s: Tensor, h: Tensor) -> Tensor:
    """The sample of every element of `h`, of which some dims, along which it does not change, have other sizes."""
    kept = [slice(None) if n == m else slice(0, 1) for n, m in zip(s.shape, h.shape, strict=True)]
    return s[tuple(kept)].expand(h.shape)


def anchor(h: Tensor) -> Tensor:
    """A small part of every loss that is its own sample's alone."""
    return 0.1 * h.unsqueeze(-1).flatten(1).sum(1)


class Scale(torch.autograd.Function):
    """Linear, written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0.7

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 0.7


class Shorten(torch.autograd.Function):
    """The identity, with a backward that is not linear: long cotangents along the last dim are made shorter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (1 + g.square().sum(-1, keepdim=True))


class Whole(torch.autograd.Function):
    """The identity, with a backward that looks at the whole cotangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (1 + g.norm())


class InPlace(torch.autograd.Function):
    """The identity, with a backward that writes into its cotangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.mul_(2)


class Mm(torch.autograd.Function):
    """A product, named like PyTorch's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.reshape(-1, x.shape[-1]).t() @ g.reshape(-1, g.shape[-1])


class Mul(torch.autograd.Function):
    """A product of elements, named like PyTorch's own; the weight has the shape of the last dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).reshape(-1, w.shape[-1]).sum(0)


class NativeLayerNorm(torch.autograd.Function):
    """A scale along the last dim, named like PyTorch's own norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).reshape(-1, w.shape[-1]).sum(0)
