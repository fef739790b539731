"""Several parameters in one factor: their samples are one parameter's after another's.

Gradients that are made at once are best asked at once. `split` gives every parameter its part, a factor like any other;
`regroup` finds parts that are of one whole again, for whoever has collected them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .base import Factor, Selection, Shape, vanishing
from .exact import Exact
from .limits import Unit
from .workspace import Workspace


def split(whole: Factor, count: int) -> list[Factor]:
    """The factors of ``count`` parameters, whose samples are equal parts of those of a ``whole``."""
    return [whole] if count == 1 else [Part(whole, place, count) for place in range(count)]


def regroup(factors: Mapping[str, Factor]) -> Iterator[tuple[list[str], Factor]]:
    """All factors, with the names they have: those of one whole as that whole, if none of its parts is missing."""
    groups: dict[int, list[str]] = {}
    for name, factor in factors.items():
        groups.setdefault(id(factor.whole if isinstance(factor, Part) else factor), []).append(name)
    for names in groups.values():
        first = factors[names[0]]
        parts = [part for name in names if isinstance(part := factors[name], Part)]
        if isinstance(first, Part) and [part.place for part in parts] == list(range(first.count)):
            yield names, first.whole
        else:
            yield from (([name], factors[name]) for name in names)


def one_by_one(take: Callable[[str, Factor], None]) -> Callable[[Sequence[str], Factor], None]:
    """Call ``take`` for every parameter of a factor."""

    def take_all(names: Sequence[str], factor: Factor) -> None:
        for name, part in zip(names, split(factor, len(names)), strict=True):
            take(name, part)

    return take_all


class Part(Factor):
    """One of ``count`` equal parts of a factor's samples: number ``place``. Its norms are found by the whole."""

    __slots__ = ("_alone", "count", "place", "whole")

    def __init__(self, whole: Factor, place: int, count: int) -> None:
        self.whole, self.place, self.count = whole, place, count
        self._alone: Factor | None = None

    @property
    def alone(self) -> Factor:
        """A factor of these samples alone, which answers everything that the whole does not."""
        if self._alone is None:
            start = self.place * self.batch
            self._alone = self.whole[start : start + self.batch]
        if self.whole.knows_norms and not self._alone.knows_norms:
            self._alone.take_norms(self.own_norms())
        return self._alone

    @property
    def batch(self) -> int:
        return self.whole.batch // self.count

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
        return self.whole.nbytes // self.count

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.alone.tensors

    @property
    def cancels(self) -> bool:
        return self.whole.cancels

    @property
    def rounds_written(self) -> bool:
        return self.whole.rounds_written

    @property
    def knows_norms(self) -> bool:
        return self.whole.knows_norms

    def own_norms(self, space: Workspace | None = None) -> Tensor:
        return self.whole.own_norms(space).view(self.count, self.batch)[self.place]

    def measure(self, space: Workspace) -> None:
        self.whole.measure(space)

    def imprecise(self, space: Workspace | None = None) -> Tensor:
        samples = self.whole.imprecise(space)
        return samples[samples // self.batch == self.place] % self.batch if samples.numel() else samples

    def stack(self, out: Tensor | None = None) -> Tensor:
        return self.alone.stack(out)

    def __getitem__(self, samples: Selection) -> Factor:
        return self.alone[samples]

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        return self.alone.gram(other.alone if isinstance(other, Part) else other, space)

    def stacks(self, space: Workspace) -> Iterator[tuple[slice, Tensor]]:
        return self.alone.stacks(space)

    def add_to(self, out: Tensor) -> None:
        self.alone.add_to(out)

    def elements(self, start: int, stop: int) -> Tensor | None:
        return self.alone.elements(start, stop)

    def prefers_stack(self, reused: bool) -> bool:
        return self.whole.prefers_stack(reused)

    def sizes(self) -> Tensor:
        return self.alone.sizes()

    def rounding(self) -> Tensor:
        return self.alone.rounding()

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        self.measure(space or Workspace())
        return self.alone.norm_bounds(space)

    def widened(self, dtype: torch.dtype | None = None) -> Factor:
        return self.alone.widened(dtype)

    def exact(self, unit: Unit, space: Workspace) -> Exact:
        self.measure(space)
        self.own_norms(space)
        return self.alone.exact(unit, space)

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        return self.alone.weighted_sum(weights, space)

    def sum_squares(self, center: Tensor | None = None, space: Workspace | None = None) -> Tensor:
        return self.alone.sum_squares(center, space)

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        return self.alone.dot(directions, space)

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        return self.alone.compress(left, right, space)


_SMALL = 2**15  # bytes of a sum; making larger ones at once costs a copy that shows


def bounded_sums(factors: dict[str, Factor], weights: Tensor, space: Workspace) -> dict[str, Tensor]:
    """`bounded_sum` of every factor, in its own dtype; ``factors`` is emptied on the way."""
    tiny, sums = vanishing(weights), dict[str, Tensor]()
    for names, whole in regroup(factors):
        for name in names:
            del factors[name]
        totals = _bounded_sums(whole, len(names), weights, tiny, space)
        sums.update((name, total.to(whole.dtype)) for name, total in zip(names, totals, strict=True))
    return sums


def _bounded_sums(whole: Factor, count: int, weights: Tensor, tiny: Tensor, space: Workspace) -> Sequence[Tensor]:
    """At once, unless some samples have to be written out."""
    small = whole.numel * whole.dtype.itemsize <= _SMALL
    if count > 1 and small and not tiny.numel() and not (whole.cancels and whole.imprecise(space).numel()):
        return whole.weighted_sums(count, weights.to(whole.device), space)
    return [part.bounded_sum(weights, space, tiny) for part in split(whole, count)]
