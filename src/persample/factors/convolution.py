"""Gradients of convolution weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.convolution import Geometry, weight_per_sample
from .base import Factor, Shape, deliver


class Convolution(Factor):
    """Weight gradients from inputs x (B, R, Cin, *S) and cotangents dy (B, R, Cout, *O): R images per sample."""

    __slots__ = ("dy", "geometry", "size", "x")

    def __init__(self, x: Tensor, dy: Tensor, size: Shape, geometry: Geometry) -> None:
        self.x, self.dy, self.size, self.geometry = x, dy, size, geometry

    @property
    def batch(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> Shape:
        return self.size

    @property
    def dtype(self) -> torch.dtype:
        return self.dy.dtype

    def stack(self, out: Tensor | None = None) -> Tensor:
        if out is not None and (not out.is_contiguous() or out.dtype != self.dtype):
            return deliver(self.stack(), out)
        return weight_per_sample(self.x, self.dy, self.size, self.geometry, out=out)
