"""Several parameters of one shape in one factor: the B samples of the first parameter, then those of the second, ...

Gradients that are computed at once are best reduced at once. `split` gives every parameter its `Part`, a factor like
any other; `regroup` joins parts into their whole again, for reductions that have collected them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .base import Factor, Selection, Shape
from .integer_sums import IntegerSum
from .limits import Unit
from .workspace import Workspace


def split(whole: Factor, count: int) -> list[Factor]:
    """The factors of ``count`` parameters, whose samples are equal parts of those of a ``whole``."""
    return [whole] if count == 1 else [Part(whole, place, count) for place in range(count)]


def regroup(factors: Mapping[str, Factor]) -> Iterator[tuple[list[str], Factor]]:
    """All factors with their names, where the parts of one whole become that whole if none of them is missing."""
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
    """A function that calls ``take`` with the name and the part of every parameter of a factor."""

    def take_all(names: Sequence[str], factor: Factor) -> None:
        for name, part in zip(names, split(factor, len(names)), strict=True):
            take(name, part)

    return take_all


class Part(Factor):
    """Number ``place`` of ``count`` equal parts of a factor's samples. Its norms are computed by the whole."""

    __slots__ = ("_standalone", "count", "place", "whole")

    def __init__(self, whole: Factor, place: int, count: int) -> None:
        self.whole, self.place, self.count = whole, place, count
        self._standalone: Factor | None = None

    @property
    def standalone(self) -> Factor:
        """A factor of these samples alone, to which everything is left that the whole does not do."""
        if self._standalone is None:
            start = self.place * self.batch
            self._standalone = self.whole[start : start + self.batch]
        if self.whole.has_norms and not self._standalone.has_norms:
            self._standalone.set_norms(self.cached_norms())
        return self._standalone

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
        return self.standalone.tensors

    @property
    def may_cancel(self) -> bool:
        return self.whole.may_cancel

    @property
    def integer_sum_needs_stack(self) -> bool:
        return self.whole.integer_sum_needs_stack

    @property
    def has_norms(self) -> bool:
        return self.whole.has_norms

    def cached_norms(self, space: Workspace | None = None) -> Tensor:
        return self.whole.cached_norms(space).view(self.count, self.batch)[self.place]

    def cache_batch_independent_norms(self, space: Workspace) -> None:
        self.whole.cache_batch_independent_norms(space)

    def cancelling_samples(self, space: Workspace | None = None) -> Tensor:
        samples = self.whole.cancelling_samples(space)
        return samples[samples // self.batch == self.place] % self.batch if samples.numel() else samples

    def stack(self, out: Tensor | None = None) -> Tensor:
        return self.standalone.stack(out)

    def __getitem__(self, samples: Selection) -> Factor:
        return self.standalone[samples]

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        return self.standalone.gram(other.standalone if isinstance(other, Part) else other, space)

    def stacks(self, space: Workspace) -> Iterator[tuple[slice, Tensor]]:
        return self.standalone.stacks(space)

    def add_to(self, out: Tensor) -> None:
        self.standalone.add_to(out)

    def elements(self, start: int, stop: int) -> Tensor | None:
        return self.standalone.elements(start, stop)

    def prefers_stack(self, reused: bool) -> bool:
        return self.whole.prefers_stack(reused)

    def term_norms(self) -> Tensor:
        return self.standalone.term_norms()

    def rounding_errors(self) -> Tensor:
        return self.standalone.rounding_errors()

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        self.cache_batch_independent_norms(space or Workspace())
        return self.standalone.norm_bounds(space)

    def upcast(self, dtype: torch.dtype | None = None) -> Factor:
        return self.standalone.upcast(dtype)

    def integer_sum(self, unit: Unit, space: Workspace) -> IntegerSum:
        self.cache_batch_independent_norms(space)
        self.cached_norms(space)
        return self.standalone.integer_sum(unit, space)

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        return self.standalone.weighted_sum(weights, space)

    @property
    def bounds_sums(self) -> bool:
        return self.whole.bounds_sums

    def bounded_sum(self, weights: Tensor, space: Workspace) -> Tensor:
        return self.standalone.bounded_sum(weights, space)

    def sum_squares(self, center: Tensor | None = None, space: Workspace | None = None) -> Tensor:
        return self.standalone.sum_squares(center, space)

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        return self.standalone.dot(directions, space)

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        return self.standalone.compress(left, right, space)
