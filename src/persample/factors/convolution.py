"""Gradients of convolution weights."""

from __future__ import annotations

import math
from math import prod

import torch
from torch import Tensor

from ..kernels.conv_gram import pixel_gram_norms
from ..kernels.conv_kernels import FEW_CHANNELS
from ..kernels.convolution import (
    Geometry,
    as_matrices,
    chosen_kernel,
    convolve,
    weight_per_sample,
    weight_summed,
)
from ..kernels.gram import ROWS
from ..kernels.norms import row_norms, wide
from .base import Factor, Samples, Shape, deliver
from .workspace import Workspace

# What else counts, in multiplications of a matrix product: an element of a stack, written and read once or twice; of
# patches for a stack, or for Gram matrices, of few channels or of several; of a Gram matrix.
_SCRATCH, _KEPT, _PATCH, _FEW, _SEVERAL, _PAIR = 30, 35, 27, 96, 45, 75
_TEMPORARIES = 4  # times a gradient: room for what a kernel writes beside it
_LATER = 1.2  # products in a sum of all samples, later, take so much longer than for a stack


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
        return self.x.shape[1] * prod(self._space)

    @property
    def _space(self) -> Shape:
        """The places of the kernel, by axis."""
        return tuple((self.x if self.geometry.transposed else self.dy).shape[3:])

    def prefers_stack(self, reused: bool) -> bool:
        """Whether Gram matrices, and products later if the stack would be reused, cost more than it does."""
        T, p, d = self.positions, self.size[0] // self.geometry.groups, prod(self.size[1:])
        gram = min(self._patch_gram_cost, self._pixel_gram_cost)
        later = _LATER * T * p * d if reused else 0
        return gram + later > p * d * (T + (_KEPT if reused else _SCRATCH)) + _PATCH * T * d

    @property
    def _patch_gram_cost(self) -> float:
        """Multiplications for norms from Gram matrices of patches, of one sample and group."""
        T, p, d = self.positions, self.size[0] // self.geometry.groups, prod(self.size[1:])
        return T * T * (p + d + _PAIR) + (_FEW if self.size[1] < FEW_CHANNELS else _SEVERAL) * T * d

    @property
    def _pixel_gram_cost(self) -> float:
        """The same with Gram matrices of pixels, which are more than the positions, but have fewer channels."""
        T, p, d = self.positions, self.size[0] // self.geometry.groups, self.size[1]
        return T * T * (p + _PAIR / 2) + self._pixels**2 * (d + _PAIR)

    @property
    def _pixels(self) -> int:
        """How many pixels of a sample are read, padding included."""
        return self.x.shape[1] * prod(self.geometry.read_size(self._space, self.size[2:]))

    def _compute_norms(self, space: Workspace) -> Tensor:
        if not self.positions or self.prefers_stack(False):
            return self._norms_by_stack(space)
        if self._pixel_gram_cost <= self._patch_gram_cost:
            return self._norms_by_pixels(space)
        dtype, T, groups = wide(self.dtype), self.positions, self.geometry.groups
        each = groups * T * (2 * min(T, ROWS) + prod(self.size[1:])) * dtype.itemsize
        parts = (
            as_matrices(self.x[some].to(dtype), self.dy[some].to(dtype), self.size, self.geometry)
            for some in space.chunks(self.batch, each)
        )
        return self._norms_by_gram(parts, groups, space)

    def _norms_by_stack(self, space: Workspace) -> Tensor:
        """In portions that stay in cache, with what the kernels write on the way."""
        norms = []
        for some in space.chunks(self.batch, _TEMPORARIES * self.numel * self.dtype.itemsize):
            part = self[some]
            out = None if part._has_own_memory else space.take((part.batch, *self.shape), self.dtype, self.device)
            norms.append(row_norms(part.stack(out)))
        return torch.cat(norms)

    @property
    def _has_own_memory(self) -> bool:
        """Whether the kernel makes its result itself, and would only copy it elsewhere."""
        return chosen_kernel(self.x, self.dy, self.size, self.geometry) == "library"

    def _norms_by_pixels(self, space: Workspace) -> Tensor:
        dtype, groups = wide(self.dtype), self.geometry.groups
        each_bytes = 3 * groups * self._pixels * min(self._pixels, 2 * ROWS) * dtype.itemsize
        norms, holds = [], []
        for some in space.chunks(self.batch, each_bytes):
            x, dy = self.x[some].to(dtype), self.dy[some].to(dtype)
            each, ok = pixel_gram_norms(x, dy, self.size, self.geometry, self.dtype)
            norms.append(each if groups == 1 else row_norms(each.view(-1, groups)))
            holds.append(ok.view(-1, groups).all(1))
        return self.checked(torch.cat(norms), torch.cat(holds), space)

    def sizes(self) -> Tensor:
        """As for outer products; every input is in at most as many patches as the kernel has places."""
        return row_norms(self.x) * row_norms(self.dy) * math.sqrt(prod(self.size[2:]))

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        """The library's own summed gradient, of scaled inputs or cotangents, whichever are fewer."""
        dtype = wide(self.dtype)
        x, dy, scale = self.x.to(dtype), self.dy.to(dtype), weights.to(dtype).view(-1, *[1] * (self.x.ndim - 1))
        x, dy = (x * scale, dy) if x.numel() < dy.numel() else (x, dy * scale)
        return weight_summed(x, dy, self.size, self.geometry)

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        """The cotangents times the input convolved with each direction, unless the gradients serve several of them."""
        if len(directions) > 2 or not self.x.numel() or not self.dy.numel():
            return super().dot(directions, space)
        dtype = wide(self.dtype)
        x, dy = self.x.to(dtype), self.dy.to(dtype)
        found = [(dy * convolve(x, v.to(dtype), self.geometry)).flatten(1).sum(1) for v in directions]
        return torch.stack(found, 1) if found else dy.new_zeros(self.batch, 0)
