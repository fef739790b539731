"""Outer products with a side that is too large to keep: it is computed when needed, for a few samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..kernels.devices import can_look
from ..kernels.differentiable import is_differentiable
from ..kernels.norms import wide
from .base import Factor, Selection, Shape
from .integer_sums import STACK_ELEMENTS, STACK_POSITIONS, ChunkedSum, IntegerSum
from .limits import Unit, roundoff
from .moments import Sides, added, empty_moments, sum_of
from .outer import Outer, prefers_stack
from .stacks import copied_to
from .workspace import Workspace


class Deferred(Factor):
    """Outer products that ``make(samples)`` computes, for at most ``max_samples`` samples at a time.

    Nothing is kept: every method calls ``make`` again for every sample.
    """

    __slots__ = ("_batch", "_make", "_max_samples", "_shape", "_tensors", "positions")

    def __init__(
        self,
        make: Callable[[Selection], Outer],
        batch: int,
        positions: int,
        shape: Shape,
        tensors: tuple[Tensor, ...],
        max_samples: int,
    ) -> None:
        self._make, self._batch, self._shape, self._max_samples = make, batch, shape, max(max_samples, 1)
        self.positions = positions  # T
        self._tensors = tensors  # what ``make`` reads; the first has the dtype of the gradients

    @property
    def batch(self) -> int:
        return self._batch

    @property
    def shape(self) -> Shape:
        return self._shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._tensors

    def __getitem__(self, samples: Selection) -> Outer:
        return self._make(samples)

    def compute_all(self) -> Outer:
        """The outer products of all samples, to be kept."""
        return self._make(slice(0, self.batch))

    def _slices(self) -> Iterator[slice]:
        for start in range(0, max(self.batch, 1), self._max_samples):  # one empty slice for no samples
            yield slice(start, min(start + self._max_samples, self.batch))

    def _parts(self) -> Iterator[tuple[slice, Outer]]:
        return ((some, self._make(some)) for some in self._slices())

    def stack(self, out: Tensor | None = None) -> Tensor:
        if is_differentiable():
            return copied_to(out, torch.cat([part.stack() for _, part in self._parts()]))
        if out is None:
            out = torch.empty(self.batch, *self.shape, dtype=self.dtype, device=self.device)
        for some, part in self._parts():
            part.stack(out[some])
        return out

    def prefers_stack(self, reused: bool) -> bool:
        p, d = self.shape
        return prefers_stack(self.positions, p, d, dtype=self.dtype, device=self.device, reused=reused)

    def _compute_norms(self, space: Workspace) -> Tensor:
        if not can_look(self.device):
            return torch.cat([part.cached_norms(space) for _, part in self._parts()])
        norms, cancelling = [], []
        for some, part in self._parts():
            norms.append(part.norms(space))
            cancelling.append(part.cancelling_samples(space) + some.start)
        self._cancelling = torch.cat(cancelling)
        return torch.cat(norms)

    def term_norms(self) -> Tensor:
        return torch.cat([part.term_norms() for _, part in self._parts()])

    def upcast(self, dtype: torch.dtype | None = None) -> Factor:
        return self.compute_all().upcast(dtype)

    def rounding_errors(self) -> Tensor:
        return roundoff(self.dtype, self.positions) * self.term_norms()

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        if self.integer_sum_needs_stack:
            return super().norm_bounds(space)
        return torch.cat([self._part_with_norms(some, space).norm_bounds(space) for some in self._slices()])

    @property
    def integer_sum_needs_stack(self) -> bool:
        return self.dtype.is_complex or (self.positions >= STACK_POSITIONS and self.numel <= STACK_ELEMENTS)

    def integer_sum(self, unit: Unit, space: Workspace) -> IntegerSum:
        def make_later(some: slice) -> Callable[[], IntegerSum]:
            return lambda: self._part_with_norms(some, space).integer_sum(unit, space)

        return ChunkedSum([(some, make_later(some)) for some in self._slices()])

    def _part_with_norms(self, some: slice, space: Workspace | None) -> Outer:
        """The outer products of some samples, with the norms that are already computed."""
        self.cache_batch_independent_norms(space or Workspace())
        part = self._make(some)
        part.set_norms(self.cached_norms(space)[some])
        return part

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        total = torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        for some, part in self._parts():
            total += part.weighted_sum(weights[some], space)
        return total

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        return torch.cat([part.dot(directions, space) for _, part in self._parts()])

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        """Every pair of samples meets: the outer products of all samples are kept at once."""
        return self.compute_all().gram(other.compute_all() if isinstance(other, Deferred) else other, space)

    def moments(self, left: bool, right: bool, space: Workspace | None = None) -> Sides:
        total = empty_moments(self, left, right)
        for _, part in self._parts():
            total = added(total, part.moments(left, right, space))
        return total

    def rotated_squares(self, left: Tensor | None, right: Tensor | None, space: Workspace | None = None) -> Tensor:
        return sum_of([part.rotated_squares(left, right, space) for _, part in self._parts()])

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        return torch.cat([part.compress(left, right, space) for _, part in self._parts()])
