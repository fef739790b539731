"""Bringing samples to the front: from a tensor and its layout to one row of numbers per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from ..factors import Dense, Factor, Outer, factors_of_rows, products_of_rows
from ..kernels.norms import wide
from ..kernels.rows import rows_summed
from ..numberless import with_numbers
from .layout import Block, Layout, Shape, broadcast_dims, labels, sample_dims, split


class SampleRows:
    """N rows, each of which belongs to one sample: group them, or sum them, by sample."""

    __slots__ = ("_order", "_rows", "a", "b", "batch")

    def __init__(self, batch: int, a: int, b: int, rows: Tensor | None = None) -> None:
        self.batch, self.a, self.b = batch, a, b
        self._rows = rows
        self._order: Tensor | None = None

    @property
    def is_ragged(self) -> bool:
        """May samples have different numbers of rows?"""
        return self._rows is not None

    @classmethod
    def labelled(cls, batch: int, rows: Tensor) -> SampleRows:
        """Row n belongs to sample rows[n]; -1 is nobody's."""
        return cls(batch, 0, 0, rows)

    @classmethod
    @with_numbers
    def of(cls, layout: Layout, shape: Shape, row_dims: int) -> SampleRows | None:
        """The first ``row_dims`` dims as rows; None when there are fewer, or the sample also depends on another."""
        even = _even_rows(layout, shape, row_dims) if isinstance(layout, Block) else None
        if even is not None:
            return cls(layout.batch, *even)
        if row_dims > len(shape) or any(d >= row_dims for d in sample_dims(layout, shape)):
            return None
        index = labels(layout, shape).reshape(_row_sizes(layout, shape, row_dims))
        return cls.labelled(layout.batch, index.expand(shape[:row_dims]).reshape(-1))

    def group(self, t: Tensor) -> Tensor:
        """(N, ...) -> (B, T, ...), T rows for every sample; ragged samples are padded with zeros."""
        rest = t.shape[1:]
        if self._rows is None:
            if self.a == 1:
                return t.reshape(self.batch, self.b, *rest)
            if self.b == 1:
                return t.reshape(self.a, self.batch, *rest).transpose(0, 1)
            return (
                t.reshape(self.a, self.batch, self.b, *rest).transpose(0, 1).reshape(self.batch, self.a * self.b, *rest)
            )
        order = self.order().to(t.device, non_blocking=True)
        picked = t.index_select(0, order.clamp(min=0).reshape(-1)) if len(t) else t.new_zeros(order.numel(), *rest)
        picked = picked.reshape(*order.shape, *rest)
        return picked.masked_fill((order < 0).reshape(*order.shape, *[1] * len(rest)), 0)

    def products(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Factor:
        """The factor of Σ left[n] ⊗ right[n] over the rows of every sample."""
        if self._rows is None:
            return Outer(self.group(left), self.group(right), scale)
        return products_of_rows([left], [right], self._rows, self.batch, scale)

    def factor(self, rows: Sequence[Tensor], make: Callable[[list[Tensor]], Factor]) -> Factor:
        """What ``make`` makes of the rows (B, T, ...) of every sample.

        Ragged samples are padded with zeros in groups, so that T, by which rounding errors are bounded, does not depend
        on how many rows others have.
        """
        if self._rows is None:
            return make([self.group(t) for t in rows])
        return factors_of_rows(rows, self._rows, self.batch, make)

    def written_out(self, rows: Sequence[Tensor], compute: Callable[[list[Tensor]], Tensor]) -> Dense:
        """The gradients that ``compute`` writes out, of the rows (B, T, ...) of every sample, as in `factor`."""
        factor = self.factor(rows, lambda grouped: Dense(compute(grouped)))
        return factor if isinstance(factor, Dense) else Dense(factor.stack())

    def sum(self, t: Tensor) -> Tensor:
        """(N, ...) -> (B, ...)."""
        if self._rows is None:
            rest = t.shape[1:]
            if self.a == self.b == 1:
                return t.reshape(self.batch, *rest)
            return t.reshape(self.a, self.batch, self.b, *rest).sum((0, 2))
        rows, count = self._targets()
        return rows_summed(t, rows.to(t.device, non_blocking=True), count)[: self.batch]

    @with_numbers
    def _targets(self) -> tuple[Tensor, int]:
        """Where rows are added, and to how many sums: those of the samples, and one for all that are nobody's."""
        assert self._rows is not None
        nobodys = self._rows < 0
        return torch.where(nobodys, self.batch, self._rows), self.batch + int(bool(nobodys.any()))

    @with_numbers
    def order(self) -> Tensor:
        """(B, T): the rows of every sample, -1 where it has fewer."""
        if self._order is None:
            assert self._rows is not None
            rows = self._rows
            sorted_rows, where = torch.sort(rows, stable=True)
            counts = torch.bincount(rows + 1, minlength=self.batch + 1)
            starts = counts.cumsum(0) - counts
            width = int(counts[1:].max()) if len(rows) else 0
            table = torch.full((self.batch, width), -1, device="cpu")
            live = sorted_rows >= 0
            column = torch.arange(len(rows), device="cpu") - starts[sorted_rows + 1]
            table[sorted_rows[live], column[live]] = where[live]
            self._order = table
        return self._order


@lru_cache(maxsize=65536)
def _even_rows(layout: Block, shape: Shape, row_dims: int) -> tuple[int, int] | None:
    """(a, b) where the rows are a rounds of B runs of b rows, one run per sample; None if that is not their order."""
    width = prod(shape[row_dims:])
    if any(d >= row_dims for d in sample_dims(layout, shape)) or not width or layout.inner % width:
        return None
    inner = layout.inner // width
    rounds, remainder = divmod(prod(shape[:row_dims]), inner * layout.batch)
    return None if remainder else (rounds, inner)


def _row_sizes(layout: Layout, shape: Shape, row_dims: int) -> list[int]:
    varying = sample_dims(layout, shape)
    return [shape[d] if d in varying else 1 for d in range(row_dims)]


def sum_per_sample(t: Tensor, layout: Layout, target: Shape) -> Tensor:
    """(B, *target): for every sample, its part of ``t`` summed over the dims along which ``target`` was broadcast."""
    shape = tuple(t.shape)
    if isinstance(layout, Block) and layout.batch == 1:
        return t.sum_to_size(target).unsqueeze(0)
    route = _route(layout, shape, target) if isinstance(layout, Block) else None
    if route is None:
        reduced = [d for d, to in enumerate(broadcast_dims(shape, target)) if to is None]
        return _sum_labelled(t, layout, reduced, sample_dims(layout, shape), target)
    dim, sizes, over = route
    if dim is None:
        grouped = t.reshape(*sizes, *target)
        return grouped.sum(1) if over else grouped.squeeze(1)
    split_up: Tensor = t.unflatten(dim, sizes)
    kept = split_up.sum(over, keepdim=True) if over else split_up
    return kept.movedim(dim + 1, 0).reshape(layout.batch, *target)


@lru_cache(maxsize=65536)
def _route(layout: Block, shape: Shape, target: Shape) -> tuple[int | None, Shape, Shape] | None:
    """How samples in one dim are brought to the front: which dim is split, into what, and what is summed then.

    No dim where the sample comes first and the parameter has the last dims: one view. None: not as simple as that.
    """
    reduced = [d for d, to in enumerate(broadcast_dims(shape, target)) if to is None]
    varying = sample_dims(layout, shape)
    parts = split(layout, shape, varying[0]) if len(varying) == 1 else None
    if parts is None or varying[0] not in reduced:
        return None
    (dim,), (a, b) = varying, parts
    if dim == 0 and a == 1 and len(reduced) == len(shape) - len(target) and shape[len(reduced) :] == target:
        rows = prod(shape[: len(reduced)]) // layout.batch
        return None, (layout.batch, rows), () if rows == 1 else (1,)
    longer = (*shape[:dim], a, layout.batch, b, *shape[dim + 1 :])
    over = [d for d in reduced if d < dim] + [dim, dim + 2] + [d + 2 for d in reduced if d > dim]
    return dim, (a, layout.batch, b), tuple(d for d in over if longer[d] != 1)


def _sum_labelled(t: Tensor, layout: Layout, reduced: Sequence[int], varying: Sequence[int], target: Shape) -> Tensor:
    """`sum_per_sample` by an explicit sample for every row.

    Rows are told apart by their sample and by their place in the dims that stay.
    """
    shape = tuple(t.shape)
    others = [d for d in reduced if d not in varying]
    part = t.sum(others, keepdim=True, dtype=wide(t.dtype)) if others else t  # not rounded between both sums
    staying = [d for d in varying if d not in reduced]
    rest = [d for d in range(len(shape)) if d not in varying]
    rows = part.permute([*varying, *rest]).reshape(prod(shape[d] for d in varying), prod(part.shape[d] for d in rest))
    index = _samples_and_places(layout, shape, staying, [*varying, *rest])
    summed = SampleRows.labelled(layout.batch * prod(shape[d] for d in staying), index).sum(rows)
    sizes = [shape[d] for d in staying] + [part.shape[d] for d in rest]
    order = [0, *[(staying + rest).index(d) + 1 for d in range(len(shape)) if d in staying or d in rest]]
    return summed.to(t.dtype).reshape(layout.batch, *sizes).permute(order).reshape(layout.batch, *target)


@with_numbers
def _samples_and_places(layout: Layout, shape: Shape, dims: Sequence[int], order: Sequence[int]) -> Tensor:
    """A number for every element that tells its sample and its place in these dims; -1 is nobody's.

    Elements come with their dims in the ``order`` given, one after another.
    """
    places, place = prod(shape[d] for d in dims), torch.zeros((), dtype=torch.int64, device="cpu")
    for d in dims:
        along = torch.arange(shape[d], device="cpu").reshape([-1 if e == d else 1 for e in range(len(shape))])
        place = place * shape[d] + along
    sample_index = labels(layout, shape)
    numbers = torch.where(sample_index < 0, sample_index, sample_index * places + place)
    return numbers.permute(list(order)).reshape(-1)
