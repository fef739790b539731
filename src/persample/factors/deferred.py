"""Outer products of which one side is large, and computed when it is needed for a few samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..kernels.norms import wide
from .base import Factor, Selection, Shape
from .exact import ELEMENTS, POSITIONS, Exact, InTurns
from .limits import Unit, roundoff
from .outer import Outer
from .workspace import Workspace


class Deferred(Factor):
    """``make(samples)`` are the outer products of some samples; ``most`` says of how many at a time.

    Every answer costs another call of ``make`` for every sample: what would have been kept is computed again.
    """

    __slots__ = ("_batch", "_make", "_most", "_shape", "_tensors", "positions")

    def __init__(
        self,
        make: Callable[[Selection], Outer],
        batch: int,
        positions: int,
        shape: Shape,
        tensors: tuple[Tensor, ...],
        most: int,
    ) -> None:
        self._make, self._batch, self._shape, self._most = make, batch, shape, max(most, 1)
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

    def whole(self) -> Outer:
        """The same, kept."""
        return self._make(slice(0, self.batch))

    def _slices(self) -> Iterator[slice]:
        for start in range(0, max(self.batch, 1), self._most):  # once, if there are none
            yield slice(start, min(start + self._most, self.batch))

    def _parts(self) -> Iterator[tuple[slice, Outer]]:
        return ((some, self._make(some)) for some in self._slices())

    def stack(self, out: Tensor | None = None) -> Tensor:
        found = torch.empty(self.batch, *self.shape, dtype=self.dtype, device=self.device) if out is None else out
        for some, part in self._parts():
            part.stack(found[some])
        return found

    def prefers_stack(self, reused: bool) -> bool:
        p, d = self.shape
        left, right = (torch.empty(1, self.positions, n, dtype=self.dtype, device="meta") for n in (p, d))
        return Outer(left, right).prefers_stack(reused)

    def _compute_norms(self, space: Workspace) -> Tensor:
        found, imprecise = [], []
        for some, part in self._parts():
            found.append(part.norms(space))
            imprecise.append(part.imprecise(space) + some.start)
        self._imprecise = torch.cat(imprecise)
        return torch.cat(found)

    def sizes(self) -> Tensor:
        return torch.cat([part.sizes() for _, part in self._parts()])

    def widened(self, dtype: torch.dtype | None = None) -> Factor:
        return self.whole().widened(dtype)

    def rounding(self) -> Tensor:
        return roundoff(self.dtype, self.positions) * self.sizes()

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        if self.rounds_written:
            return super().norm_bounds(space)
        return torch.cat([self._known(some, space).norm_bounds(space) for some in self._slices()])

    @property
    def rounds_written(self) -> bool:
        return self.dtype.is_complex or (self.positions >= POSITIONS and self.numel <= ELEMENTS)

    def exact(self, unit: Unit, space: Workspace) -> Exact:
        def made(some: slice) -> Callable[[], Exact]:
            return lambda: self._known(some, space).exact(unit, space)

        return InTurns([(some, made(some)) for some in self._slices()])

    def _known(self, some: slice, space: Workspace | None) -> Outer:
        """A part that knows its norms."""
        self.measure(space or Workspace())
        part = self._make(some)
        part._norms = self.own_norms(space)[some]
        return part

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        total = torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        for some, part in self._parts():
            total += part.weighted_sum(weights[some], space)
        return total

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        return torch.cat([part.dot(directions, space) for _, part in self._parts()])

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        """Every pair of samples meets: here both are kept."""
        return self.whole().gram(other.whole() if isinstance(other, Deferred) else other, space)

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        return torch.cat([part.compress(left, right, space) for _, part in self._parts()])
