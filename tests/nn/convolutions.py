"""Convolutions to be differentiated, by `persample.nn.grad` and by autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample.nn import grad
from tests.reference import assert_same, definition

FAMILIES = ["conv", "conv_transpose"]
KINDS = ["input", "weight", "weight_per_sample", "bias", "bias_per_sample"]
NAMES = [f"{family}{n}d_{kind}" for family in FAMILIES for n in (1, 2, 3) for kind in KINDS]


@dataclass(frozen=True)
class Case:
    """A convolution to be differentiated."""

    n: int
    family: str = "conv"
    batch: int = 3
    channels: tuple[int, int] = (4, 6)
    space: tuple[int, ...] = (8, 7, 6)
    kernel: tuple[int, ...] = (3, 2, 2)
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        options = ",".join(f"{k}={v}" for k, v in self.options.items()).replace(" ", "")
        return f"{self.family}{self.n}d-B{self.batch}-{'x'.join(map(str, self.space[: self.n]))}-{options}"

    @property
    def input_size(self) -> tuple[int, ...]:
        return (self.batch, self.channels[0], *self.space[: self.n])

    @property
    def weight_size(self) -> tuple[int, ...]:
        into, out = self.channels if self.family == "conv_transpose" else self.channels[::-1]
        return (into, out // self.options.get("groups", 1), *self.kernel[: self.n])

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, dtype=self.dtype)

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
            return getattr(F, f"{self.family}{self.n}d")(x, w, b, **self.options)

    def ours(self, kind: str) -> Callable[..., Tensor]:
        return getattr(grad, f"{self.family}{self.n}d_{kind}")


def every_gradient(case: Case, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """What the five functions give, each as a stack."""
    return {
        "input": case.ours("input")(x.shape, w, dy, **case.options),
        "weight": case.ours("weight")(x, w.shape, dy, **case.options)[None],
        "weight_per_sample": case.ours("weight_per_sample")(x, w.shape, dy, **case.options),
        "bias": case.ours("bias")(dy)[None],
        "bias_per_sample": case.ours("bias_per_sample")(dy),
    }


def by_autograd(case: Case, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The same through the forward pass."""
    b = dy.new_zeros(dy.shape[1])
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    y = case.forward(x, w, b)
    whole = torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
    product = y * dy.conj()
    each = definition((product.real if dy.is_complex() else product).flatten(1).sum(1), {"w": w, "b": b})
    return dict(zip(KINDS, (whole[0], whole[1][None], each["w"], whole[2][None], each["b"]), strict=True))


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and a gradient at the output."""
    torch.manual_seed(0)
    x, w = case.random(*case.input_size), case.random(*case.weight_size)
    return x, w, case.random(*case.forward(x, w).shape)


def check(case: Case, rtol: float = 1e-9) -> None:
    x, w, dy = tensors(case)
    assert_same(every_gradient(case, x, w, dy), by_autograd(case, x, w, dy), rtol=rtol)
