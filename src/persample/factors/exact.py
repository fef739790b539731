"""Sums over samples that are exact, of shares that are bounded: what one sample can move is a theorem.

A sum in floating point rounds at every addition, and how it rounds depends on all samples. Two sums that differ in one
sample may so differ by more than that sample: by any amount, where somebody chooses the data and their order. Here
every sample's share is rounded on its own, to whole numbers of one `Unit`, and whole numbers are added up without
rounding, in any order, over parts of a batch and over processes.

What a sample adds with weight w is at most ``w · bound + √w · root + rest`` (`Limits`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.norms import wide
from .limits import NORM, WHOLE, Limits, Unit
from .workspace import Workspace

if TYPE_CHECKING:
    from .base import Factor

_PASSES = 2.0**-21  # the relative error of what is scaled: by a weight that is rounded, and the product, in float32
_IN_RANGE = 1e30  # scales beyond are not for float32
_LONG_ROW = 2**13  # elements of a gradient; of smaller ones, many are rounded at a time
_MANY_ROWS = 2**9  # of which the sum fits into float64
POSITIONS = 32  # from so many terms on, writing out and rounding costs less than products in float64;
ELEMENTS = 2**24  # but not more than so many elements


class Exact(ABC):
    """Gradients of some samples, to be summed as whole numbers of a unit."""

    limits: Limits

    @abstractmethod
    def totals(self, weights: Tensor, parts: int = 1) -> Tensor:
        """(parts, *shape): Σ_b weights[b] · gradient[b], each rounded, over each of so many equal parts of the samples.

        They have the unit's dtype. Complex numbers are pairs of a last dim.
        """


class Written(Exact):
    """Any gradients: written out a few at a time, and rounded."""

    def __init__(self, factor: Factor, unit: Unit, space: Workspace) -> None:
        self._factor, self._unit, self._space = factor, unit, space
        reals = factor.numel * (2 if factor.dtype.is_complex else 1)
        bound = factor.norm_bounds(space) * (1 + _PASSES)
        self.limits = Limits(bound, torch.zeros_like(bound), math.sqrt(reals) / 2 * unit.size, bound)

    def totals(self, weights: Tensor, parts: int = 1) -> Tensor:
        factor, scales = self._factor, weights / self._unit.size
        shape = (*factor.shape, 2) if factor.dtype.is_complex else factor.shape
        found = torch.zeros(parts, math.prod(shape), dtype=self._unit.dtype, device=factor.device)
        each = factor.batch // parts
        if found.numel() and each:
            for some, stack in factor.wide_stacks(self._space):
                for part in range(some.start // each, -(-some.stop // each)):  # those that begin or end in here
                    start, stop = max(some.start, part * each), min(some.stop, (part + 1) * each)
                    rows = _real(stack[start - some.start : stop - some.start])
                    _add(rows, scales[start:stop].to(factor.device), found[part])
        return found.view(parts, *shape)


def _add(rows: Tensor, scales: Tensor, total: Tensor) -> None:
    """Add rows times scales, each element rounded."""
    dtype = wide(rows.dtype)
    if rows.shape[1] >= _LONG_ROW and total.dtype == torch.float64 and not _large(scales, dtype).numel():
        for row, scale in zip(rows, scales.to(dtype).tolist(), strict=True):  # one after another, in the cache
            total += (row.to(dtype) * scale).round_()
        return
    for some in range(0, len(rows), _MANY_ROWS):
        whole = rounded(rows[some : some + _MANY_ROWS], scales[some : some + _MANY_ROWS])
        total += whole.sum(0, dtype=torch.float64).to(total.dtype)


class Listed(Exact):
    """Rows of a table: each is rounded, and added where it belongs."""

    def __init__(self, ids: Tensor, rows: Tensor, table: int, bounds: Tensor, sizes: Tensor, unit: Unit) -> None:
        self._ids, self._rows, self._table, self._unit = ids, rows, table, unit  # (B, T) and (B, T, *row)
        reals = math.prod(rows.shape[1:]) * (2 if rows.is_complex() else 1)
        zero = torch.zeros_like(bounds)
        self.limits = Limits(bounds + _PASSES * sizes, zero, math.sqrt(reals) / 2 * unit.size, sizes)

    def totals(self, weights: Tensor, parts: int = 1) -> Tensor:
        rows = torch.view_as_real(self._rows.resolve_conj()) if self._rows.is_complex() else self._rows
        shape = (parts, self._table, *rows.shape[2:])
        # In int64, as the terms of a sample may be larger than their sum.
        found = torch.zeros(parts * self._table, math.prod(shape[2:]), dtype=torch.int64, device=rows.device)
        if not found.numel() or not rows.numel():
            return found.view(shape).to(self._unit.dtype)
        whole = rounded(_real(rows), weights / self._unit.size)
        first = torch.arange(parts, device=rows.device).repeat_interleave(len(rows) // parts) * self._table
        live, places = self._ids.reshape(-1) >= 0, (self._ids + first.unsqueeze(1)).reshape(-1)
        values = whole.view(len(places), -1).to(found.dtype)
        return found.index_add_(0, places[live], values[live]).view(shape).to(self._unit.dtype)


class Product(Exact):
    """Sums of products of two sides, both rounded: the products are whole numbers, and so is every sum of them.

    Both sides of a sample are scaled by a power of two first, so that they are equally large, and rounded to whole
    numbers of about half of the bits each.
    """

    def __init__(
        self,
        sides: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor],
        multiply: Callable[[Tensor, Tensor, int], Tensor],  # the sums over equal parts of the samples, of other sides
        bounds: Tensor,
        unit: Unit,
        space: Workspace,
        *,
        spread: float = 1.0,  # how often an element of a side is used, at most: the square root of it
        scale: float = 1.0,  # of all products
    ) -> None:
        self._sides, self._multiply, self._unit, self._space, self._scale = sides, multiply, unit, space, scale
        low = unit.exponent // 2
        self._units = math.ldexp(1.0, low), math.ldexp(1.0, unit.exponent - low)
        self._norms = norms[0] * (1 + 2 * NORM), norms[1] * (1 + 2 * NORM)
        self._rests = [math.sqrt(math.prod(side.shape[1:])) / 2 for side in sides]  # of rounding, in the sides' units
        terms = self._norms[0] * self._norms[1] * abs(scale)
        size = spread * terms
        rests = self._rests[0] * self._units[0], self._rests[1] * self._units[1]
        self.limits = Limits(
            bounds + 2 * _PASSES * size,
            spread * math.sqrt(2) * terms.sqrt() * (rests[0] + rests[1]),
            spread * rests[0] * rests[1],
            size,
        )

    def totals(self, weights: Tensor, parts: int = 1) -> Tensor:
        scales, room = self._scales(weights)
        each = len(room) // parts
        if parts == 1:
            return self._part(slice(0, each), scales, room)
        if each and float(room.view(parts, each).sum(1).max()) < 2.0**WHOLE:
            return self._total(slice(None), scales, parts)
        return torch.cat([self._part(slice(k * each, (k + 1) * each), scales, room) for k in range(parts)])

    def _part(self, samples: slice, scales: tuple[Tensor, Tensor], room: Tensor) -> Tensor:
        """(1, *shape): a few samples at a time."""
        found: Tensor | None = None
        for some in self._portions(room[samples]):
            total = self._total(slice(samples.start + some.start, samples.start + some.stop), scales, 1)
            found = total if found is None else found.add_(total)
        assert found is not None
        return found

    def _total(self, some: slice, scales: tuple[Tensor, Tensor], parts: int) -> Tensor:
        left, right = (rounded(s[some], scale[some]).double() for s, scale in zip(self._sides, scales, strict=True))
        found = self._multiply(left, right, parts)
        return found if found.dtype == self._unit.dtype else found.to(self._unit.dtype)

    def _scales(self, weights: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """What to multiply the sides with, and how large a sample's terms then are at most."""
        weights = weights.to(self._norms[0]) * self._scale
        ratio = self._norms[1].log2() - self._norms[0].log2() - weights.abs().log2()
        nothing = ~ratio.isfinite()  # where a side or a weight is zero
        power = ratio.div(2).round_().exp2_()
        left = (weights * power / self._units[0]).masked_fill_(nothing, 0)
        right = (1 / (power * self._units[1])).masked_fill_(nothing, 0)
        terms = [n * s.abs() + rest for n, s, rest in zip(self._norms, (left, right), self._rests, strict=True)]
        return (left, right), terms[0] * terms[1]

    def _portions(self, room: Tensor) -> Iterator[slice]:
        """As many samples at a time as float64 can add up without rounding, and as memory has room for."""
        each = sum(math.prod(side.shape[1:]) for side in self._sides) * 8
        sizes = room.tolist()
        if not sizes:
            yield slice(0, 0)
        for some in self._space.whole().chunks(len(sizes), each):
            start, filled = some.start, 0.0
            for b in range(some.start, some.stop):
                if filled + sizes[b] >= 2.0**WHOLE and b > start:
                    yield slice(start, b)
                    start, filled = b, 0.0
                filled += sizes[b]
            yield slice(start, some.stop)


class Several(Exact):
    """The sum of several terms, of which each may be larger than the sum: they are added up in int64.

    That may overflow on the way, but not in the end, and whole numbers that overflow come back.
    """

    def __init__(self, terms: Sequence[Exact], bounds: Tensor, unit: Unit) -> None:
        self._terms, self._unit = terms, unit
        every = Limits.added([term.limits for term in terms])
        # Each term's own bound holds more than rounding; of that the bound of the sum is enough.
        self.limits = Limits(bounds + 4 * _PASSES * every.size, every.root, every.rest, every.size)

    def totals(self, weights: Tensor, parts: int = 1) -> Tensor:
        total = self._terms[0].totals(weights, parts)
        for term in self._terms[1:]:
            total += term.totals(weights, parts)
        return total.to(self._unit.dtype)


class InTurns(Exact):
    """Samples that are made a few at a time, for every question anew."""

    def __init__(self, turns: Sequence[tuple[slice, Callable[[], Exact]]]) -> None:
        self._turns = turns
        every = [make().limits for _, make in turns]
        bound, root, size = (torch.cat(t) for t in zip(*[(x.bound, x.root, x.size) for x in every], strict=True))
        self.limits = Limits(bound, root, every[0].rest, size)

    def totals(self, weights: Tensor, parts: int = 1) -> Tensor:
        assert parts == 1
        (some, make), *others = self._turns
        total = make().totals(weights[some])
        for some, make in others:
            total += make().totals(weights[some])
        return total


def rounded(rows: Tensor, scales: Tensor) -> Tensor:
    """(B, ...) times scales (B,), to the nearest whole numbers, in float32 or float64."""
    dtype, scales = wide(rows.dtype), scales.to(rows.device)
    large = _large(scales, dtype)
    each = scales.to(dtype).view(-1, *[1] * (rows.ndim - 1))
    found = (rows.to(dtype) * each).round_()
    if large.numel():  # these alone: how a sample's share is rounded must not depend on others
        found = found.double()
        found[large] = (rows[large].double() * scales[large].double().view(-1, *[1] * (rows.ndim - 1))).round_()
    return found


def _large(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The samples whose scale is not for float32."""
    if dtype == torch.float64:
        return scales.new_empty(0, dtype=torch.long)
    return (scales.abs() >= _IN_RANGE).nonzero().squeeze(1)


def _real(stack: Tensor) -> Tensor:
    if stack.is_complex():
        stack = torch.view_as_real(stack.resolve_conj())
    return stack.reshape(len(stack), math.prod(stack.shape[1:]))
