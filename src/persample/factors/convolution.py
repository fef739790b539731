"""Gradients of convolution weights."""

from __future__ import annotations

import math
from math import prod

import torch
from torch import Tensor

from ..kernels.convolution import Geometry, as_matrices, convolve, weight_per_sample, weight_summed
from ..kernels.gram import ROWS
from ..kernels.norms import row_norms, wide
from .base import Factor, Samples, Shape, deliver
from .workspace import Workspace

# In multiplications of a matrix product: an element of a stack, written and read, or kept; an element of the patches.
_SCRATCH, _KEPT, _PATCH = 30, 100, 30


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
    def tensors(self) -> tuple[Tensor, ...]:
        return self.dy, self.x

    def __getitem__(self, samples: Samples) -> Convolution:
        return Convolution(self.x[samples], self.dy[samples], self.size, self.geometry)

    def stack(self, out: Tensor | None = None) -> Tensor:
        if out is not None and (not out.is_contiguous() or out.dtype != self.dtype):
            return deliver(self.stack(), out)
        return weight_per_sample(self.x, self.dy, self.size, self.geometry, out=out)

    def elements(self, start: int, stop: int) -> Tensor | None:
        if self.geometry.groups != 1 or self.geometry.transposed:
            return None
        row = prod(self.size[1:])
        first, last = start // row, (stop - 1) // row + 1
        channels = Convolution(self.x, self.dy[:, :, first:last], (last - first, *self.size[1:]), self.geometry)
        return channels.stack().flatten(1)[:, start - first * row : stop - first * row]

    @property
    def positions(self) -> int:
        """T: places of the kernel, over all images of a sample."""
        return self.x.shape[1] * prod((self.x if self.geometry.transposed else self.dy).shape[3:])

    def prefers_stack(self, reused: bool) -> bool:
        """As for outer products of patches and cotangents, with the patches to be written first."""
        T, p, d = self.positions, self.size[0] // self.geometry.groups, prod(self.size[1:])
        return T * T * (p + d) + _PATCH * T * d > p * d * (_KEPT if reused else T + _SCRATCH)

    def _compute_norms(self, space: Workspace) -> Tensor:
        if not self.positions or self.prefers_stack(False):
            return super()._compute_norms(space)
        dtype, T, groups = wide(self.dtype), self.positions, self.geometry.groups
        each = groups * T * (2 * min(T, ROWS) + prod(self.size[1:])) * dtype.itemsize
        parts = (
            as_matrices(self.x[some].to(dtype), self.dy[some].to(dtype), self.size, self.geometry)
            for some in space.chunks(self.batch, each)
        )
        return self._norms_by_gram(parts, groups, space)

    def sizes(self) -> Tensor:
        """As for outer products; every input is in at most as many patches as the kernel has places."""
        return row_norms(self.x) * row_norms(self.dy) * math.sqrt(prod(self.size[2:]))

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        """The library's own summed gradient, of scaled cotangents."""
        dtype = wide(self.dtype)
        scaled = self.dy.to(dtype) * weights.to(dtype).view(-1, *[1] * (self.dy.ndim - 1))
        return weight_summed(self.x.to(dtype), scaled, self.size, self.geometry)

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        """The cotangents times the input convolved with each direction, unless the gradients serve several of them."""
        if len(directions) > 2 or not self.x.numel() or not self.dy.numel():
            return super().dot(directions, space)
        dtype = wide(self.dtype)
        x, dy = self.x.to(dtype), self.dy.to(dtype)
        found = [(dy * convolve(x, v.to(dtype), self.geometry)).flatten(1).sum(1) for v in directions]
        return torch.stack(found, 1) if found else dy.new_zeros(self.batch, 0)
