"""Gradients of convolution weights, made from the inputs and cotangents of the convolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels.certificates import is_traced
from ..kernels.convolution import (
    Geometry,
    Sizes,
    as_matrices,
    choose,
    chosen_kernel,
    convolve,
    keeps_stack,
    pixel_gram_norms,
    samples_per_step,
    weight_per_sample,
    weight_summed,
)
from ..kernels.differentiable import is_differentiable
from ..kernels.gram import ROWS, terms_in
from ..kernels.graph_ops import asks_ops
from ..kernels.norms import row_norms, wide
from .base import Factor, Selection, Shape
from .integer_sums import STACK_POSITIONS, IntegerSum, ProductSum
from .limits import Unit, gram_bounds, roundoff
from .norms import norms_from_gram, with_untrusted_recomputed
from .stacks import copied_to
from .workspace import Workspace

_ops = torch.ops.persample  # see `convolution_ops`
_SOME_SAMPLES = 32  # a batch size for choices that must not depend on the real one
_TEMPORARIES = 3  # times the size of a gradient: room for what a kernel writes beside it
_OUTSIDE_CACHE = 4  # times the cache: inputs and cotangents for the library, which reads them only once


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

    def __getitem__(self, samples: Selection) -> Convolution:
        return Convolution(self.x[samples], self.dy[samples], self.size, self.geometry)

    def stack(self, out: Tensor | None = None) -> Tensor:
        if out is not None and (not out.is_contiguous() or out.dtype != self.dtype or is_differentiable()):
            return out.copy_(self.stack())
        if self._asks_ops:
            return copied_to(out, _ops.convolution_stack(*self._as_arguments))
        return weight_per_sample(self.x, self.dy, self.size, self.geometry, out=out)

    def upcast(self, dtype: torch.dtype | None = None) -> Convolution:
        dtype = dtype or wide(self.dtype)
        if dtype == self.dtype:
            return self
        return Convolution(self.x.to(dtype), self.dy.to(dtype), self.size, self.geometry)

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

    @property
    def _patches(self) -> int:
        """Elements of one sample's unfolded input."""
        return self.positions * prod(self.size[1:]) * self.geometry.groups

    @property
    def _sizes(self) -> Sizes:
        """The sizes by which kernels are chosen."""
        return Sizes.of(self.x, self.dy, self.size, self.geometry)

    def prefers_stack(self, reused: bool) -> bool:
        sizes = replace(self._sizes, B=_SOME_SAMPLES) if is_traced() else self._sizes  # a graph is for all batch sizes
        return keeps_stack(sizes) if reused else choose(sizes, "norms") == "stack"

    @property
    def _asks_ops(self) -> bool:
        """Is this traced into a graph for the CPU, in which `convolution_ops` compute what is asked?"""
        return asks_ops(self.device)

    @property
    def _as_arguments(self) -> tuple[Any, ...]:
        """The factor as the ops take it."""
        return self.x, self.dy, *self._shape_arguments

    @property
    def _shape_arguments(self) -> tuple[Any, ...]:
        return self.size, *self.geometry.arguments

    def _compute_norms(self, space: Workspace) -> Tensor:
        if self._asks_ops:
            return _ops.convolution_norms(*self._as_arguments, space.limit, False)  # type: ignore[no-any-return]
        if is_differentiable():
            return self._differentiable_norms(space)
        return self.NORMS[choose(self._sizes, "norms")](self, space)

    def _differentiable_norms(self, space: Workspace) -> Tensor:
        """All samples at once: what is written on the way is kept for another backward in any case."""
        way = choose(self._sizes, "norms")
        if way == "patches":
            left, right = as_matrices(*self.upcast()._sides, self.size, self.geometry, None)
            return norms_from_gram(self, [(left, right)], self.geometry.groups, space)
        return self._norms_by_pixels(space) if way == "pixels" else row_norms(self.stack())

    def _norms_by_stack(self, space: Workspace) -> Tensor:
        """Norms of gradients that are written out, for so few samples at a time that caches hold them."""
        own_memory = chosen_kernel(self.x, self.dy, self.size, self.geometry) in ("library", "forward")
        temporaries, norms = _TEMPORARIES * self.numel, []
        for part in self._in_cache(space, temporaries, self._cached_elements if own_memory else temporaries):
            out = None if own_memory else space.take((part.batch, *self.shape), self.dtype, self.device)
            norms.append(row_norms(part.stack(out)))
        return norms[0] if len(norms) == 1 else torch.cat(norms)

    @property
    def _cached_elements(self) -> int:
        """Elements of a sample to keep in cache for the library's kernels: not all, as each call is expensive."""
        return max(self.numel, (prod(self.x.shape[1:]) + prod(self.dy.shape[1:])) // _OUTSIDE_CACHE)

    def _norms_by_positions(self, space: Workspace) -> Tensor:
        """Norms of gradients whose elements stay in the order in which products of unfolded inputs give them."""
        patches, norms = self._patches, []
        each = max(patches, self.numel)
        for part in self._in_cache(space, each, each):
            memory = space.take((part.batch, patches + self.numel), wide(self.dtype), self.device).flatten()
            left, right = part._matrices(memory)
            out = memory[right.numel() :].view(len(left), left.shape[2], right.shape[2])
            torch.bmm(left.mT, right, out=out)
            norms.append(row_norms(out.view(part.batch, self.numel).to(self.dtype)))  # infinite where that is
        return torch.cat(norms)

    def _norms_by_patches(self, space: Workspace) -> Tensor:
        """Norms from the Gram matrices of cotangents and unfolded inputs."""
        groups = self.geometry.groups
        each = self._patches + 2 * groups * self.positions * min(self.positions, ROWS)
        pairs = (
            part._matrices(space.take((part.batch, self._patches), wide(self.dtype), self.device))
            for part in self._in_cache(space, each, each)
        )
        return norms_from_gram(self, pairs, groups, space)

    def _norms_by_pixels(self, space: Workspace) -> Tensor:
        """Norms from the Gram matrices of cotangents and inputs, without unfolding."""
        dtype, groups = wide(self.dtype), self.geometry.groups
        norms, trusted = [], []
        pixels = self.x.shape[1] * prod(self._read_size)
        for part in self._portions(space, 3 * groups * pixels * min(pixels, 2 * ROWS)):
            each, ok = pixel_gram_norms(part.x.to(dtype), part.dy.to(dtype), self.size, self.geometry, self.dtype)
            norms.append(each if groups == 1 else row_norms(each.view(-1, groups)))
            trusted.append(ok.view(-1, groups).all(1))
        return with_untrusted_recomputed(self, torch.cat(norms), torch.cat(trusted), space)

    NORMS: ClassVar[Mapping[str, Callable[[Convolution, Workspace], Tensor]]] = {
        "stack": _norms_by_stack,
        "positions": _norms_by_positions,
        "patches": _norms_by_patches,
        "pixels": _norms_by_pixels,
    }

    @property
    def _sides(self) -> tuple[Tensor, Tensor]:
        return self.x, self.dy

    def _matrices(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Cotangents and unfolded inputs as matrices, the latter in the memory of ``out``."""
        return as_matrices(self.x.to(out.dtype), self.dy.to(out.dtype), self.size, self.geometry, out)

    @property
    def _read_size(self) -> Shape:
        """How many pixels the kernel reads along each axis, padding included."""
        return self.geometry.read_size((self.x if self.geometry.transposed else self.dy).shape[3:], self.size[2:])

    def _portions(self, space: Workspace, elements: int) -> Iterator[Convolution]:
        """The factor, a few samples at a time, where each sample needs ``elements`` elements of temporary memory."""
        for some in space.chunks(self.batch, elements * wide(self.dtype).itemsize):
            yield self if some.stop - some.start == self.batch else self[some]

    def _in_cache(self, space: Workspace, elements: int, cached: int) -> Iterator[Convolution]:
        """`_portions` of no more samples than caches hold, with ``cached`` elements of each."""
        step = samples_per_step(cached, self.x)
        for part in self._portions(space, elements):
            for start in range(0, part.batch, step):
                yield part if part.batch <= step else part[start : start + step]

    def term_norms(self) -> Tensor:
        """‖x‖‖dy‖ times the root of the kernel's size, as every input is in at most so many patches."""
        ask = self._asks_ops
        sizes = _ops.convolution_term_norms(self.x, self.dy) if ask else row_norms(self.x) * row_norms(self.dy)
        return sizes * math.sqrt(prod(self.size[2:]))

    @property
    def integer_sum_needs_stack(self) -> bool:
        return self.positions >= STACK_POSITIONS

    def rounding_errors(self) -> Tensor:
        return roundoff(self.dtype, self.positions) * self.term_norms()

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        if self.integer_sum_needs_stack or self._way_to_norms in ("stack", "positions"):
            return super().norm_bounds(space)
        self.cache_batch_independent_norms(space or Workspace())
        read, other = (self.dy, self.x) if self.geometry.transposed else (self.x, self.dy)
        channels, kernel = read.shape[2] // self.geometry.groups, prod(self.size[2:])
        terms = max(terms_in(channels * kernel), channels + kernel) + terms_in(other.shape[2])
        return gram_bounds(self.cached_norms(space), self.term_norms(), terms, self.dtype)

    def cache_batch_independent_norms(self, space: Workspace) -> None:
        if self._asks_ops:
            if not self.has_norms and self.batch and self.numel:
                self._norms = _ops.convolution_norms(*self._as_arguments, space.limit, True)
        elif self.integer_sum_needs_stack or wide(self.dtype) != self.dtype:
            super().cache_batch_independent_norms(space)
        elif not self.has_norms and self.batch and self.numel:
            self._norms = self.NORMS[self._way_to_norms](self, space)

    @property
    def _way_to_norms(self) -> str:
        """The way to norms that is chosen for a fixed batch size, whatever the real one is."""
        return choose(replace(self._sizes, B=_SOME_SAMPLES), "norms")

    def integer_sum(self, unit: Unit, space: Workspace) -> IntegerSum:
        if self.integer_sum_needs_stack:
            return super().integer_sum(unit, space)

        def multiply(x: Tensor, dy: Tensor, parts: int) -> Tensor:
            pairs = zip(x.chunk(parts), dy.chunk(parts), strict=True) if len(x) else [(x, dy)] * parts
            sums = [weight_summed(a, b, self.size, self.geometry) for a, b in pairs]
            return torch.stack(sums).round_()  # some algorithms for convolutions do not only add up products

        norms, spread = (row_norms(self.x), row_norms(self.dy)), math.sqrt(prod(self.size[2:]))
        return ProductSum((self.x, self.dy), norms, multiply, self.norm_bounds(space), unit, space, spread=spread)

    @property
    def bounds_sums(self) -> bool:
        return self._asks_ops

    def bounded_sum(self, weights: Tensor, space: Workspace) -> Tensor:
        """By an op that looks for the samples whose terms cancel, and writes their gradients out."""
        args = self.x, self.dy, weights, self.cached_norms(space), *self._shape_arguments, space.limit
        return _ops.convolution_bounded_sum(*args)  # type: ignore[no-any-return]

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        """The library's own gradient for a batch, with the weights on inputs or cotangents, whichever are smaller."""
        dtype = wide(self.dtype)
        x, dy, scale = self.x.to(dtype), self.dy.to(dtype), weights.to(dtype).view(-1, *[1] * (self.x.ndim - 1))
        x, dy = (x * scale, dy) if x.numel() < dy.numel() else (x, dy * scale)
        return weight_summed(x, dy, self.size, self.geometry)

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        """⟨dy, x convolved with v⟩ for up to two directions; for more of them, writing gradients out costs less."""
        if len(directions) > 2 or not self.x.numel() or not self.dy.numel():
            return super().dot(directions, space)
        dtype = wide(self.dtype)
        x, dy = self.x.to(dtype), self.dy.to(dtype)
        products = [(dy * convolve(x, v.to(dtype), self.geometry)).flatten(1).sum(1) for v in directions]
        return torch.stack(products, 1) if products else dy.new_zeros(self.batch, 0)

    def dot_and_sum(self, direction: Tensor, weights: Tensor, space: Workspace | None = None) -> tuple[Tensor, Tensor]:
        """Gradients of many positions and few elements are written out for the price of their sum."""
        if self.x.numel() and self.prefers_stack(reused=True):
            return self._dot_and_sum_of_stacks(direction, weights, space)
        return super().dot_and_sum(direction, weights, space)

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        """Σ_t (leftᵀ dy_t) ⊗ (rightᵀ patch_t): an input convolved with the columns of ``right`` needs no patches."""
        if not self._compresses_images(left, right):
            return super().compress(left, right, space)
        dtype, groups = wide(self.dtype), self.geometry.groups
        read, other = (self.dy, self.x) if self.geometry.transposed else (self.x, self.dy)
        kernels = right.to(dtype).t().reshape(-1, *self.size[1:])
        of_groups = left.to(dtype).unflatten(0, (groups, -1)).mT
        compressed = []
        each = other.shape[1] * groups * prod(other.shape[3:]) * (left.shape[1] + right.shape[1])
        for some in (space or Workspace()).chunks(self.batch, each * dtype.itemsize):
            images = read[some].to(dtype).unflatten(2, (groups, -1)).flatten(1, 2)
            of_patches = convolve(images, kernels, self.geometry.for_one_group())
            for axis, size in enumerate(other.shape[3:]):  # output_padding may have left room for more
                of_patches = of_patches.narrow(3 + axis, 0, size)
            of_cotangents = of_groups @ other[some].to(dtype).unflatten(2, (groups, -1)).flatten(4)
            compressed.append((of_cotangents.flatten(1, 2) @ of_patches.flatten(3).mT).sum(1))
        return torch.cat(compressed)

    def _compresses_images(self, left: Tensor, right: Tensor) -> bool:
        """Does that take fewer multiplications than gradients that are written out, and is it right for these?"""
        if len(left) != self.size[0] or self.dtype.is_complex:
            return False
        if not all(t.numel() for t in (self.x, self.dy, left, right)):
            return False
        (channels, above), (columns, beside), groups = left.shape, right.shape, self.geometry.groups
        rows, places = channels // groups, self.positions * groups
        by_images = places * (columns * beside + rows * above + above * beside)
        return by_images <= places * rows * columns + self.numel * beside
