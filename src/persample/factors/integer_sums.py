"""Weighted sums over samples without rounding errors, in which the contribution of every sample is bounded.

A sum in floating point rounds at every addition, and how it rounds depends on all samples. So two sums that differ in
one sample may differ by more than that sample: by any amount, if somebody chooses the data and their order. Here the
contribution of every sample is rounded on its own, to a whole number of one `Unit`, and whole numbers are added up
without rounding, in any order, over parts of a batch and over processes. What one sample can change is therefore
proven, not estimated: with weight w at most ``w · linear + √w · root + constant`` (`Limits`).

`Factor.integer_sum` chooses the class for its form: `StackSum` for any gradients, `RowsSum` for rows of a table,
`ProductSum` for sums of products; `TermsSum`, `ChunkedSum` and `GroupedSum` are made of others.

Where numbers cannot be looked at, every sample is rounded in float64, and one question is left for all sums together:
whether float64 can add up a factor's products at once (`IntegerSum.term_sizes`). The answer decides how they are
added up, never how they are rounded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.certificates import is_traced
from ..kernels.devices import can_look
from ..kernels.norms import wide
from ..kernels.pages import recycled
from .balance import Balance, TermSizes
from .limits import NORM_ERROR, WHOLE, Limits, Unit
from .precise import precise_stacks
from .stacks import real_matrix
from .workspace import Workspace

if TYPE_CHECKING:
    from .base import Factor

_SCALING_ERROR = 2.0**-21  # relative, in float32: the weight is rounded, and so is the product with it
_FLOAT32_SCALES = 1e30  # larger scales need float64
_LONG_ROW = 2**13  # elements of a gradient; of shorter ones, many are rounded at a time
_ROWS_AT_A_TIME = 2**9  # whose sum fits into float64
# Writing gradients out and rounding them costs less than products in float64 from so many positions on,
# for at most so many elements.
STACK_POSITIONS = 32
STACK_ELEMENTS = 2**24


class IntegerSum(ABC):
    """A weighted sum of the gradients of some samples in whole numbers of a unit, still without its weights."""

    limits: Limits  # which weights keep every sample's contribution below a bound
    term_sizes: Sequence[TermSizes] = ()  # where all are below 2**WHOLE, products can be added up ``at_once``

    @abstractmethod
    def totals(self, weights: Tensor, parts: int = 1, *, at_once: bool = False) -> Tensor:
        """(parts, *shape): Σ_b weights[b] · gradient[b], each rounded, over each of so many equal parts of the samples.

        The totals have the unit's dtype. Complex numbers are pairs in a last dim. Unless products are known to be small
        enough to be added up ``at_once``, the sizes of their terms are looked at.
        """


class StackSum(IntegerSum):
    """Gradients of any form: written out a few at a time, and rounded."""

    def __init__(self, factor: Factor, unit: Unit, space: Workspace) -> None:
        self._factor, self._unit, self._space = factor, unit, space
        reals = factor.numel * (2 if factor.dtype.is_complex else 1)
        bound = factor.norm_bounds(space) * (1 + _SCALING_ERROR)
        self.limits = Limits(bound, torch.zeros_like(bound), math.sqrt(reals) / 2 * unit.size, bound)

    def totals(self, weights: Tensor, parts: int = 1, *, at_once: bool = False) -> Tensor:
        factor, scales = self._factor, weights / self._unit.size
        shape = (*factor.shape, 2) if factor.dtype.is_complex else factor.shape
        if is_traced() and factor.batch and factor.numel:
            return self._in_a_graph(scales, parts).view(parts, *shape)
        totals = recycled((parts, math.prod(shape)), self._unit.dtype, factor.device).zero_()
        each = factor.batch // parts
        if totals.numel() and each:
            for some, stack in precise_stacks(factor, self._space):
                for part in range(some.start // each, -(-some.stop // each)):  # those that overlap with the stack
                    start, stop = max(some.start, part * each), min(some.stop, (part + 1) * each)
                    rows = real_matrix(stack[start - some.start : stop - some.start])
                    _add_rounded(rows, scales[start:stop].to(factor.device), totals[part], self._space)
        return totals.view(parts, *shape)

    def _in_a_graph(self, scales: Tensor, parts: int) -> Tensor:
        """(parts, elements): all samples at once, as what each adds is bounded, and so is the sum; nothing in place."""
        stacks = [real_matrix(stack) for _, stack in precise_stacks(self._factor, self._space)]
        rows = stacks[0] if len(stacks) == 1 else torch.cat(stacks)
        whole = rounded(rows, scales).to(self._unit.dtype)
        return whole.view(parts, len(rows) // parts, rows.shape[1]).sum(1)


def _add_rounded(rows: Tensor, scales: Tensor, total: Tensor, space: Workspace) -> None:
    """total += Σ_b rows[b] · scales[b], each product rounded to a whole number."""
    dtype = wide(rows.dtype)
    if not can_look(rows.device):
        for few in space.chunks(len(rows), rows.shape[1] * 8, most=_ROWS_AT_A_TIME):
            total += rounded(rows[few], scales[few]).sum(0).to(total.dtype)
        return
    if rows.shape[1] >= _LONG_ROW and total.dtype == torch.float64 and not _beyond_float32(scales, dtype).numel():
        for row, scale in zip(rows, scales.to(dtype).tolist(), strict=True):  # one after another, in the cache
            total += (row.to(dtype) * scale).round_()
        return
    for some in range(0, len(rows), _ROWS_AT_A_TIME):
        whole = rounded(rows[some : some + _ROWS_AT_A_TIME], scales[some : some + _ROWS_AT_A_TIME])
        total += whole.sum(0, dtype=torch.float64).to(total.dtype)


class RowsSum(IntegerSum):
    """Rows of a table: each is rounded, and added to the row that has its id."""

    def __init__(self, ids: Tensor, rows: Tensor, table: int, bounds: Tensor, term_norms: Tensor, unit: Unit) -> None:
        self._ids, self._rows, self._table, self._unit = ids, rows, table, unit  # (B, T) and (B, T, *row)
        reals = math.prod(rows.shape[1:]) * (2 if rows.is_complex() else 1)
        zero = torch.zeros_like(bounds)
        self.limits = Limits(bounds + _SCALING_ERROR * term_norms, zero, math.sqrt(reals) / 2 * unit.size, term_norms)

    def totals(self, weights: Tensor, parts: int = 1, *, at_once: bool = False) -> Tensor:
        rows = torch.view_as_real(self._rows.resolve_conj()) if self._rows.is_complex() else self._rows
        shape = (parts, self._table, *rows.shape[2:])
        # In int64, as the terms of a sample may be larger than their sum.
        totals = torch.zeros(parts * self._table, math.prod(shape[2:]), dtype=torch.int64, device=rows.device)
        if not totals.numel() or not rows.numel():
            return totals.view(shape).to(self._unit.dtype)
        whole = rounded(real_matrix(rows), weights / self._unit.size)
        first = torch.arange(parts, device=rows.device).repeat_interleave(len(rows) // parts) * self._table
        live, places = self._ids.reshape(-1) >= 0, (self._ids + first.unsqueeze(1)).reshape(-1)
        values = whole.view(len(places), -1)
        if can_look(rows.device):
            places, values = places[live], values[live]
        else:  # zeros go to any row
            places, values = places.where(live, 0), values.masked_fill_(~live.unsqueeze(1), 0)
        return totals.index_add_(0, places, values.to(totals.dtype)).view(shape).to(self._unit.dtype)


class ProductSum(IntegerSum):
    """Sums of products of two sides. Both sides are rounded, so the products and their sums are whole numbers.

    The sides of a sample are first scaled by a power of two to be equally large, and then rounded to whole numbers with
    about half of the bits each.
    """

    def __init__(
        self,
        sides: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor],
        multiply: Callable[[Tensor, Tensor, int], Tensor],  # from rounded sides and the number of parts to totals
        bounds: Tensor,
        unit: Unit,
        space: Workspace,
        *,
        spread: float = 1.0,  # the square root of how often an element of a side is used at most
        scale: float = 1.0,  # a factor of all products
    ) -> None:
        self._sides, self._multiply, self._unit, self._space = sides, multiply, unit, space
        low = unit.exponent // 2
        units = math.ldexp(1.0, low), math.ldexp(1.0, unit.exponent - low)
        norms = norms[0] * (1 + 2 * NORM_ERROR), norms[1] * (1 + 2 * NORM_ERROR)
        rounding = [math.sqrt(math.prod(side.shape[1:])) / 2 for side in sides]  # in the sides' units
        self._balance = Balance(norms, (rounding[0], rounding[1]), units, scale)
        self.term_sizes = (self._balance.term_sizes,)
        product = norms[0] * norms[1] * abs(scale)
        terms = spread * product
        errors = rounding[0] * units[0], rounding[1] * units[1]
        self.limits = Limits(
            bounds + 2 * _SCALING_ERROR * terms,
            spread * math.sqrt(2) * product.sqrt() * (errors[0] + errors[1]),
            spread * errors[0] * errors[1],
            terms,
        )

    def totals(self, weights: Tensor, parts: int = 1, *, at_once: bool = False) -> Tensor:
        scales, terms = self._balance.scales(weights)
        each = len(terms) // parts
        if parts > 1 and each and (at_once or float(self._balance.term_sizes(weights, parts).max()) < 2.0**WHOLE):
            return self._total(slice(None), scales, parts)
        sizes = [0.0] * len(terms) if at_once else terms.tolist()
        totals = [self._part(slice(k * each, (k + 1) * each), scales, sizes) for k in range(parts)]
        return totals[0] if parts == 1 else torch.cat(totals)

    def _part(self, samples: slice, scales: tuple[Tensor, Tensor], sizes: Sequence[float]) -> Tensor:
        """(1, *shape): the total of a range of samples, a few at a time."""
        sum_so_far: Tensor | None = None
        for some in self._chunks(sizes[samples]):
            total = self._total(slice(samples.start + some.start, samples.start + some.stop), scales, 1)
            sum_so_far = total if sum_so_far is None else sum_so_far.add_(total)
        assert sum_so_far is not None
        return sum_so_far

    def _total(self, some: slice, scales: tuple[Tensor, Tensor], parts: int) -> Tensor:
        """(parts, *shape): totals of samples whose products float64 adds up without rounding."""
        left, right = (rounded(s[some], scale[some]).double() for s, scale in zip(self._sides, scales, strict=True))
        totals = self._multiply(left, right, parts)
        return totals if totals.dtype == self._unit.dtype else totals.to(self._unit.dtype)

    def _chunks(self, sizes: Sequence[float]) -> Iterator[slice]:
        """Slices of as many samples as float64 can add up without rounding, and as memory has room for."""
        each = sum(math.prod(side.shape[1:]) for side in self._sides) * 8
        if not sizes:
            yield slice(0, 0)
        for some in self._space.up_to_limit().chunks(len(sizes), each):
            start, filled = some.start, 0.0
            for b in range(some.start, some.stop):
                if filled + sizes[b] >= 2.0**WHOLE and b > start:
                    yield slice(start, b)
                    start, filled = b, 0.0
                filled += sizes[b]
            yield slice(start, some.stop)


class TermsSum(IntegerSum):
    """The sum of several terms, each of which may be larger than the sum: they are added up in int64.

    An intermediate sum may overflow. The total does not, and is right, as int64 wraps around.
    """

    def __init__(self, terms: Sequence[IntegerSum], bounds: Tensor, unit: Unit) -> None:
        self._terms, self._unit = terms, unit
        self.term_sizes = [sizes for term in terms for sizes in term.term_sizes]
        every = Limits.summed([term.limits for term in terms])
        # ``every.linear`` adds up the norms of all terms; the norm of their sum and the errors of scaling are enough.
        self.limits = Limits(bounds + 4 * _SCALING_ERROR * every.terms, every.root, every.constant, every.terms)

    def totals(self, weights: Tensor, parts: int = 1, *, at_once: bool = False) -> Tensor:
        total = self._terms[0].totals(weights, parts, at_once=at_once)
        for term in self._terms[1:]:
            total += term.totals(weights, parts, at_once=at_once)
        return total.to(self._unit.dtype)


class ChunkedSum(IntegerSum):
    """Samples whose gradients are computed a few at a time, once for the limits and again for the totals."""

    def __init__(self, chunks: Sequence[tuple[slice, Callable[[], IntegerSum]]]) -> None:
        self._chunks = chunks
        every, self.term_sizes = list[Limits](), list[TermSizes]()
        for some, make in chunks:
            integer_sum = make()
            every.append(integer_sum.limits)
            self.term_sizes += [_of_some(sizes, some) for sizes in integer_sum.term_sizes]
        linear, root, terms = (torch.cat(t) for t in zip(*[(x.linear, x.root, x.terms) for x in every], strict=True))
        self.limits = Limits(linear, root, every[0].constant, terms)

    def totals(self, weights: Tensor, parts: int = 1, *, at_once: bool = False) -> Tensor:
        assert parts == 1
        (some, make), *others = self._chunks
        total = make().totals(weights[some], at_once=at_once)
        for some, make in others:
            total += make().totals(weights[some], at_once=at_once)
        return total


class GroupedSum(IntegerSum):
    """Samples in groups, each with a sum of its own: the limits of a sample are those of its group."""

    def __init__(self, groups: Sequence[tuple[Tensor, IntegerSum]], batch: int) -> None:
        self._groups = groups  # the numbers of samples, and the sum over these
        every = [(index, each.limits) for index, each in groups]
        zeros = every[0][1].linear.new_zeros(batch)
        linear, root, terms, constant = (torch.zeros_like(zeros) for _ in range(4))
        for index, limits in every:
            index = index.to(zeros.device)
            linear[index], root[index], terms[index] = limits.linear, limits.root, limits.terms
            constant[index] = limits.constant
        self.limits = Limits(linear, root, constant, terms)
        self.term_sizes = [_of_group(sizes, index) for index, each in groups for sizes in each.term_sizes]

    def totals(self, weights: Tensor, parts: int = 1, *, at_once: bool = False) -> Tensor:
        assert parts == 1
        totals = [each.totals(weights[index.to(weights.device)], at_once=at_once) for index, each in self._groups]
        total = totals[0]
        for each in totals[1:]:
            total += each
        return total


def _of_group(sizes: TermSizes, index: Tensor) -> TermSizes:
    """The same for samples of these numbers: their sum, or each in its place."""

    def of_all(weights: Tensor, parts: int) -> Tensor:
        places = index.to(weights.device)
        if parts == 1:
            return sizes(weights[places], 1)
        each = sizes(weights[places], len(places))
        return each.new_zeros(len(weights)).index_copy_(0, places, each)

    return of_all


def _of_some(sizes: TermSizes, some: slice) -> TermSizes:
    """The same for a range of the samples that weights are given for."""
    return lambda weights, parts: sizes(weights[some], parts)


def rounded(rows: Tensor, scales: Tensor) -> Tensor:
    """(B, ...) times scales (B,), rounded to the nearest whole numbers, in float32 or float64."""
    dtype, scales = wide(rows.dtype), scales.to(rows.device)
    if not can_look(rows.device):
        each = scales.double().view(-1, *[1] * (rows.ndim - 1))
        whole = (rows.double() * each).round_()
        return torch.where(each == 0, 0, whole) if is_traced() else whole  # zero times NaN is not zero
    large = _beyond_float32(scales, dtype)
    each = scales.to(dtype).view(-1, *[1] * (rows.ndim - 1))
    whole = (rows.to(dtype) * each).round_()
    if large.numel():  # these alone: how a sample is rounded must not depend on others
        whole = whole.double()
        whole[large] = (rows[large].double() * scales[large].double().view(-1, *[1] * (rows.ndim - 1))).round_()
    return whole


def _beyond_float32(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Indices of samples whose scale needs float64."""
    if dtype == torch.float64:
        return scales.new_empty(0, dtype=torch.long)
    return (scales.abs() >= _FLOAT32_SCALES).nonzero().squeeze(1)
