"""Gradients of tables of which every sample reads some rows: embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ..kernels.devices import can_look
from ..kernels.differentiable import is_differentiable
from ..kernels.norms import root, row_norms, wide
from ..kernels.rows import Segments, add_products, rows_summed
from .base import Factor, Selection, Shape
from .integer_sums import IntegerSum, RowsSum
from .limits import Unit, roundoff
from .moments import Sides
from .stacks import real_rows, squares
from .workspace import Workspace

_COST_OF_A_PAIR = 16  # rows of two samples, picked and multiplied, beside two rows in a product of matrices
_SMALL_TABLE = 4  # times as many rows as a sample has positions: not worth sorting ids


class Rows(Factor):
    """gradient[b, ids[b, t]] += dy[b, t], for ids (B, T) and dy (B, T, *row) of a table (V, *row).

    If it ``skips``, an id may be -1, and its cotangent is left out.
    """

    __slots__ = ("dy", "ids", "size", "skips")

    def __init__(self, ids: Tensor, dy: Tensor, size: int, *, skips: bool = True) -> None:
        self.ids, self.dy, self.size, self.skips = ids, dy, size, skips

    @property
    def batch(self) -> int:
        return len(self.ids)

    @property
    def positions(self) -> int:
        """T."""
        return self.ids.shape[1]

    @property
    def shape(self) -> Shape:
        return (self.size, *self.dy.shape[2:])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.dy, self.ids

    def __getitem__(self, samples: Selection) -> Rows:
        return Rows(self.ids[samples], self.dy[samples], self.size, skips=self.skips)

    @staticmethod
    def concatenate(factors: Sequence[Rows]) -> Rows:
        """One factor for the sum: positions of all of them, one after another."""
        ids, dy = torch.cat([f.ids for f in factors], 1), torch.cat([f.dy for f in factors], 1)
        return Rows(ids, dy, factors[0].size, skips=any(f.skips for f in factors))

    def stack(self, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = self.dy.new_zeros(self.batch, *self.shape)
        else:
            out.zero_()
        self.add_to(out)
        return out

    def add_to(self, out: Tensor) -> None:
        if not out.is_contiguous():
            out += self.stack()
            return
        if out.dtype != wide(out.dtype) and not can_look(self.device):
            out += self.upcast(wide(self.dtype)).stack().to(out.dtype)
            return
        exact = out.dtype == wide(out.dtype)
        places, values = self._used_rows() if exact else self._summed_rows()  # half precision is rounded once
        out.view(self.batch * self.size, *self.dy.shape[2:]).index_add_(0, places, values.to(out.dtype))

    def _used_rows(self) -> tuple[Tensor, Tensor]:
        """The places b·V + id of all rows that are used, and their cotangents.

        Ids of -1 are left out, or, where numbers cannot be looked at, zeros go to another row.
        """
        ids, values = self.ids, self.dy.reshape(self.ids.numel(), *self.dy.shape[2:])
        if self.skips and not can_look(self.device):
            values = values.masked_fill((ids < 0).reshape(-1, *[1] * (values.ndim - 1)), 0)
            ids = ids.clamp(min=0)
        places = (ids + self._starts(self.size)).reshape(-1)
        if not self.skips or not can_look(self.device):
            return places, values
        live = (ids >= 0).reshape(-1)
        return (places, values) if bool(live.all()) else (places[live], values[live])

    def _starts(self, step: int) -> Tensor:
        """(B, 1): where the rows of every sample start, with ``step`` rows for each."""
        step = max(step, 1)
        return torch.arange(0, self.batch * step, step, device=self.device).unsqueeze(1)

    def elements(self, start: int, stop: int) -> Tensor | None:
        if self.dtype.is_complex:
            return None
        row = prod(self.shape[1:])
        first, last = start // row, (stop - 1) // row + 1
        inside = (self.ids >= first) & (self.ids < last)
        part = Rows((self.ids - first).masked_fill(~inside, -1), self.dy, last - first)
        return part.stack().flatten(1)[:, start - first * row : stop - first * row]

    def prefers_stack(self, reused: bool) -> bool:
        return False

    def _summed_rows(self) -> tuple[Tensor, Tensor]:
        """The places b·V + id of all rows that are used, each once, and their gradients in float32 or wider."""
        places, values = self._used_rows()
        used, inverse = torch.unique(places, return_inverse=True)
        return used, rows_summed(values.to(wide(values.dtype)), inverse, len(used))

    def _row_gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """For every pair of a sample and a row that it uses: the sample, the id, and the row's gradient."""
        used, totals = self._summed_rows()
        return used // self.size, used % self.size, totals

    def _row_gradients_without_looking(self) -> tuple[Tensor, Tensor]:
        """(B, T) and (B, T, *row): the ids that a sample uses, once each, and their rows' gradients.

        As many as there are positions: what is left over has the id V, and zeros.
        """
        ids, order = self.ids.contiguous().sort(1)
        first = torch.ones_like(ids, dtype=torch.bool)
        torch.ne(ids[:, 1:], ids[:, :-1], out=first[:, 1:])
        place = first.cumsum(1) + (self._starts(self.positions) - 1)
        ids = torch.full_like(ids, self.size).view(-1).scatter_(0, place.view(-1), ids.view(-1)).view(ids.shape)
        place = torch.empty_like(place).scatter_(1, order, place)
        values = self.dy.flatten(0, 1).to(wide(self.dtype))
        if self.skips:
            values = values.masked_fill((self.ids < 0).reshape(-1, *[1] * (values.ndim - 1)), 0)
            ids = ids.masked_fill(ids < 0, self.size)
        totals = torch.zeros_like(values).index_add_(0, place.view(-1), values)
        return ids, totals.view(*ids.shape, *values.shape[1:])

    def _compute_norms(self, space: Workspace) -> Tensor:
        if not can_look(self.device):
            if self.size > _SMALL_TABLE * self.positions:
                return self._norms_in_range(self._row_gradients_without_looking()[1])
            stacks = self.upcast(wide(self.dtype)).stacks(space)
            return torch.cat([self._norms_in_range(stack) for _, stack in stacks])
        sample, _, totals = self._row_gradients()
        each = self._norms_in_range(totals)
        largest = each.new_zeros(self.batch).scatter_reduce_(0, sample, each.detach(), "amax")
        scale = torch.where((largest > 0) & largest.isfinite(), largest, 1)
        if is_differentiable():  # the norm of a row of zeros has no second derivative
            squares = (real_rows(totals).to(each.dtype) / scale[sample].unsqueeze(1)).square().sum(1)
        else:
            squares = (each / scale[sample]).square()
        return root(torch.zeros_like(scale).index_add(0, sample, squares)) * scale

    def _norms_in_range(self, totals: Tensor) -> Tensor:
        """The norms of rows of totals in float32 or wider: infinite where one is in the gradients' dtype."""
        norms = row_norms(totals)
        if totals.dtype == self.dtype:
            return norms
        return torch.where(row_norms(totals.to(self.dtype)).isinf(), torch.inf, norms)

    def term_norms(self) -> Tensor:
        """Σ_t ‖dy_t‖."""
        return row_norms(self.dy.flatten(0, 1)).view(self.ids.shape).sum(1)

    def upcast(self, dtype: torch.dtype | None = None) -> Rows:
        if dtype is None:
            return self
        return Rows(self.ids, self.dy.to(torch.promote_types(dtype, self.dtype)), self.size, skips=self.skips)

    def rounding_errors(self) -> Tensor:
        return roundoff(self.dtype, self.positions) * self.term_norms()

    @property
    def integer_sum_needs_stack(self) -> bool:
        return False

    def integer_sum(self, unit: Unit, space: Workspace) -> IntegerSum:
        return RowsSum(self.ids, self.dy, self.size, self.norm_bounds(space), self.term_norms() * (1 + 2.0**-14), unit)

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        dtype = wide(self.dtype)
        total = torch.zeros(self.shape, dtype=dtype, device=self.device)
        places, values = self._used_rows()
        each = weights.to(dtype.to_real())[places // self.size]
        return total.index_add_(0, places % self.size, values.to(dtype) * each.view(-1, *[1] * (values.ndim - 1)))

    def sum_squares(self, center: Tensor | None = None, space: Workspace | None = None) -> Tensor:
        """A row that a sample does not use deviates by 0 - center."""
        if not can_look(self.device):
            return self._sum_squares_without_looking(center)
        _, ids, totals = self._row_gradients()
        dtype = wide(self.dtype).to_real()
        total = torch.zeros(self.shape, dtype=dtype, device=self.device)
        if center is None:
            return total.index_add_(0, ids, squares(totals))
        center = center.to(totals.dtype)
        unused = (self.batch - torch.bincount(ids, minlength=self.size)).to(dtype).view(-1, *[1] * (total.ndim - 1))
        deviations = totals - center[ids]
        total.index_add_(0, ids, squares(deviations)).addcmul_(unused, squares(center))
        summed = (-center * unused).index_add_(0, ids, deviations)
        return total.sub_(squares(summed) / max(self.batch, 1)).clamp_(min=0)

    def _sum_squares_without_looking(self, center: Tensor | None) -> Tensor:
        """`sum_squares`, with a row more for what is left over."""
        ids, totals = (t.flatten(0, 1) for t in self._row_gradients_without_looking())
        dtype, rows = wide(self.dtype).to_real(), (self.size + 1, *self.shape[1:])
        total = torch.zeros(rows, dtype=dtype, device=self.device)
        if center is None:
            return total.index_add_(0, ids, squares(totals))[: self.size]
        center = torch.cat([center.to(totals.dtype), totals.new_zeros(1, *self.shape[1:])])
        uses = torch.zeros(self.size + 1, dtype=dtype, device=self.device)
        unused = (self.batch - uses.index_add_(0, ids, torch.ones_like(ids, dtype=dtype))).view(
            -1, *[1] * (total.ndim - 1)
        )
        deviations = totals - center[ids]
        total.index_add_(0, ids, squares(deviations)).addcmul_(unused, squares(center))
        summed = (-center * unused).index_add_(0, ids, deviations)
        return total.sub_(squares(summed) / max(self.batch, 1)).clamp_(min=0)[: self.size]

    def moments(self, left: bool, right: bool, space: Workspace | None = None) -> Sides:
        """Columns meet only within a row: the right moment is that of the rows that are used."""
        if left or not can_look(self.device):
            return super().moments(left, right, space)
        values = real_rows(self._summed_rows()[1])
        return None, values.t() @ values if right else None

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        products = torch.zeros(self.batch, len(directions), dtype=wide(self.dtype).to_real(), device=self.device)
        places, values = self._used_rows()
        rows, sample = real_rows(values), places // self.size
        for k, direction in enumerate(directions):
            picked = real_rows(direction.to(wide(self.dtype)).index_select(0, places % self.size))
            products[:, k].index_add_(0, sample, (rows * picked).sum(1))
        return products

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        """Inner products over the rows that both use: of rows that many samples use in products of matrices."""
        if not isinstance(other, Rows):
            return super().gram(other, space)
        space = space or Workspace()
        dtype = wide(self.dtype).to_real()
        total = torch.zeros(self.batch, other.batch, dtype=dtype, device=self.device)
        if not can_look(self.device):
            return self._gram_without_looking(other, space, total)
        (samples, ids, rows), (others_samples, others_ids, others) = (f._row_gradients() for f in (self, other))
        mine, theirs = Segments.of(ids).in_common(Segments.of(others_ids))
        few = mine.counts * theirs.counts * _COST_OF_A_PAIR < self.batch * other.batch
        self._add_dense_products(total, other, mine.ids[~few], space)
        each = 2 * prod(self.shape[1:]) * wide(self.dtype).itemsize + 64
        add_products(
            total,
            (mine.at(few), samples, real_rows(rows)),
            (theirs.at(few), others_samples, real_rows(others)),
            lambda count: space.chunks(count, each),
        )
        return total

    def _add_dense_products(self, out: Tensor, other: Rows, ids: Tensor, space: Workspace) -> None:
        """Add inner products over the rows ``ids``, with zeros for samples that do not use them."""
        row = prod(self.shape[1:]) * wide(self.dtype).itemsize
        for some in space.chunks(len(ids), (self.batch + other.batch) * row):
            mine, theirs = self._only(ids[some]), other._only(ids[some])
            out.addmm_(real_rows(mine.stack()), real_rows(theirs.stack()).t())

    def _gram_without_looking(self, other: Rows, space: Workspace, out: Tensor) -> Tensor:
        """Inner products of the rows' gradients of a few samples with all of the other's, where both have the same id.

        Each row's terms are added up first: they may be much larger than their sum.
        """
        (mine, totals), (ids, others) = (f._row_gradients_without_looking() for f in (self, other))
        ids, rows = ids.reshape(1, -1), real_rows(others.flatten(0, 1))
        each = self.positions * (rows.nbytes // max(len(rows), 1) + 2 * ids.numel() * out.dtype.itemsize)
        for some in space.chunks(self.batch, each):
            products = real_rows(totals[some].flatten(0, 1)) @ rows.t()
            products = torch.where(mine[some].reshape(-1, 1) == ids, products, 0)  # what is left over has zeros
            out[some] = products.view(len(mine[some]), self.positions, other.batch, other.positions).sum((1, 3))
        return out

    def _only(self, ids: Tensor) -> Rows:
        """The gradients of the rows ``ids`` alone, which are sorted."""
        place = torch.searchsorted(ids, self.ids.contiguous()).clamp(max=len(ids) - 1)
        return Rows(place.masked_fill(ids[place] != self.ids, -1), self.dy, len(ids))

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        """Σ_t left[id_t] ⊗ (dy_t right)."""
        if self.dtype.is_complex or len(left) != self.size:
            return super().compress(left, right, space)
        dtype = wide(self.dtype)
        picked = left.to(dtype)[self.ids.clamp(min=0)].masked_fill_((self.ids < 0).unsqueeze(2), 0)
        dy = self.dy.reshape(*self.ids.shape, len(right)).to(dtype).masked_fill((self.ids < 0).unsqueeze(2), 0)
        return torch.bmm(picked.mT, dy @ right.to(dtype))
