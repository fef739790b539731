"""Parameters whose gradients were made at once, as those of one parameter with more samples."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from .base import Factor, Samples, Shape
from .exact import Exact
from .limits import Unit
from .workspace import Workspace


class Part(Factor):
    """One of ``count`` equal parts of a factor's samples: number ``place``."""

    def __init__(self, whole: Factor, place: int, count: int, batch: int, nbytes: int) -> None:
        self.whole, self.place, self.count = whole, place, count
        self._batch, self._nbytes = batch, nbytes

    @classmethod
    def all_of(cls, whole: Factor, count: int) -> list[Part]:
        """Every part, in order."""
        batch, nbytes = whole.batch // count, whole.nbytes // count
        return [cls(whole, place, count, batch, nbytes) for place in range(count)]

    @cached_property
    def alone(self) -> Factor:
        """The same as a factor of its own."""
        start = self.place * self.batch
        return self.whole[start : start + self.batch]

    @property
    def batch(self) -> int:
        return self._batch

    @property
    def shape(self) -> Shape:
        return self.whole.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.alone.tensors

    def __getitem__(self, samples: Samples) -> Factor:
        return self.alone[samples]

    @property
    def kin(self) -> Hashable:
        return Part, id(self.whole)

    def joined(self, group: Sequence[Self]) -> Factor | None:
        return self.whole if [part.place for part in group] == list(range(self.count)) else None

    @property
    def cancels(self) -> bool:
        return self.whole.cancels

    @property
    def knows_norms(self) -> bool:
        return self.whole.knows_norms

    def own_norms(self, space: Workspace | None = None) -> Tensor:
        return self.whole.own_norms(space).view(self.count, self.batch)[self.place]

    def share_norms(self, group: Sequence[Self], space: Workspace) -> None:
        self.whole.own_norms(space)

    def doubtful(self, space: Workspace | None = None) -> Tensor:
        found = self.whole.doubtful(space)
        return found if not found.numel() else found[found // self.batch == self.place] % self.batch

    def sizes(self) -> Tensor:
        return self.alone.sizes()

    def prefers_stack(self, reused: bool) -> bool:
        return self.whole.prefers_stack(reused)

    def stack(self, out: Tensor | None = None) -> Tensor:
        return self.alone.stack(out)

    def stacks(self, space: Workspace) -> Iterator[tuple[slice, Tensor]]:
        return self.alone.stacks(space)

    def add_to(self, out: Tensor) -> None:
        self.alone.add_to(out)

    def elements(self, start: int, stop: int) -> Tensor | None:
        return self.alone.elements(start, stop)

    def rounding(self) -> Tensor:
        return self.alone.rounding()

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        self._measure_alone(space)
        return self.alone.norm_bounds(space)

    def _measure_alone(self, space: Workspace | None) -> None:
        self.measure(space or Workspace())
        self.alone._norms = self.own_norms(space)

    def widened(self, dtype: torch.dtype | None = None) -> Factor:
        return self.alone.widened(dtype)

    def measure(self, space: Workspace) -> None:
        self.whole.measure(space)

    @property
    def rounds_written(self) -> bool:
        return self.whole.rounds_written

    def exact(self, unit: Unit, space: Workspace) -> Exact:
        self._measure_alone(space)
        return self.alone.exact(unit, space)

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        return self.alone.weighted_sum(weights, space)

    def weighted_sums(self, group: Sequence[Self], weights: Tensor, space: Workspace) -> Sequence[Tensor]:
        sums = self.whole.sums_of_parts(self.count, weights, space)
        return [sums[part.place] for part in group]

    def sum_squares(self, center: Tensor | None = None, space: Workspace | None = None) -> Tensor:
        return self.alone.sum_squares(center, space)

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        return self.alone.dot(directions, space)

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        return self.alone.gram(other.alone if isinstance(other, Part) else other, space)

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        return self.alone.compress(left, right, space)
