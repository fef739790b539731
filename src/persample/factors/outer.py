"""Sums of outer products: the gradients of everything that is a matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Factor, Shape


class Outer(Factor):
    """gradient[b] = Σ_t left[b, t] ⊗ right[b, t], for left (B, *G, T, p) and right (B, *G, T, d): (B, *G, p, d)."""

    __slots__ = ("left", "right", "scale")

    def __init__(self, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
        self.left, self.right, self.scale = left, right, scale

    @property
    def batch(self) -> int:
        return len(self.left)

    @property
    def shape(self) -> Shape:
        return (*self.left.shape[1:-2], self.left.shape[-1], self.right.shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def t(self) -> Outer:
        """Every gradient transposed."""
        return Outer(self.right, self.left, self.scale)

    def stack(self, out: Tensor | None = None) -> Tensor:
        left = self.left.mT
        if out is not None and (not out.is_contiguous() or out.dtype != self.dtype):
            return out.copy_(self.stack())
        if self.left.shape[-2] == 1 and self.left.ndim == 3:  # one position: a broadcast product reads and writes once
            result = torch.mul(left, self.right, out=out) if out is not None else left * self.right
        elif out is not None:
            result = torch.matmul(left, self.right, out=out)
        else:
            result = left @ self.right
        return result.mul_(self.scale) if self.scale != 1.0 else result

    def add_to(self, out: Tensor) -> None:
        if self.left.ndim == 3 and out.dtype == self.dtype:
            out.baddbmm_(self.left.mT, self.right, alpha=self.scale)
        else:
            out += self.stack()


def concatenate(factors: list[Outer]) -> Outer:
    """One factor for the sum: positions of all of them, one after another."""
    left = torch.cat([f.left if f.scale == 1.0 else f.left * f.scale for f in factors], -2)
    return Outer(left, torch.cat([f.right for f in factors], -2))
