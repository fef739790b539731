"""Factors that are made of others: views of one (`View`), and sums of several (`Sum`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from ..kernels.norms import wide
from .base import Factor, Selection, Shape
from .by_rows import beside, norms_of_both
from .dense import Dense
from .integer_sums import IntegerSum, TermsSum
from .limits import Unit, roundoff
from .norms import with_untrusted_recomputed, without_norms_of_zero
from .outer import Outer
from .rearrange import AsComplex, Cast, Permute, Rearrangement, Reshape
from .stacks import copied_to
from .tied import tied, tied_bounds, tied_gram, tied_norms
from .workspace import Workspace


class View(Factor):
    """Another factor's gradients, each rearranged, cast or set into zeros."""

    __slots__ = ("_dtype", "_shape", "base", "rearrange")

    def __init__(self, base: Factor, shape: Shape, rearrange: Rearrangement) -> None:
        self.base, self._shape, self.rearrange = base, shape, rearrange
        self._dtype: torch.dtype = getattr(rearrange, "dtype", base.dtype)

    @property
    def batch(self) -> int:
        return self.base.batch

    @property
    def shape(self) -> Shape:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.base.tensors

    def __getitem__(self, samples: Selection) -> Factor:
        return View(self.base[samples], self._shape, self.rearrange)

    def stack(self, out: Tensor | None = None) -> Tensor:
        return copied_to(out, self.rearrange(self.base.stack()))

    def add_to(self, out: Tensor) -> None:
        out += self.rearrange(self.base.stack())

    def elements(self, start: int, stop: int) -> Tensor | None:
        rearrange = self.rearrange
        keeps_order = isinstance(rearrange, Reshape) or (isinstance(rearrange, Cast) and rearrange.is_lossless)
        elements = self.base.elements(start, stop) if keeps_order else None
        return None if elements is None else elements.to(self.dtype)

    def set_norms(self, norms: Tensor) -> None:
        super().set_norms(norms)
        if self.rearrange.is_lossless:
            self.base.set_norms(norms)

    @property
    def may_cancel(self) -> bool:
        return self.rearrange.is_lossless and self.base.may_cancel

    def prefers_stack(self, reused: bool) -> bool:
        return self.base.prefers_stack(reused) if self.rearrange.is_lossless else True

    def _compute_norms(self, space: Workspace) -> Tensor:
        return self.base.norms(space) if self.rearrange.is_lossless else super()._compute_norms(space)

    def term_norms(self) -> Tensor:
        return self.base.term_norms() if self.rearrange.is_lossless else self.norms()

    def cancelling_samples(self, space: Workspace | None = None) -> Tensor:
        return self.base.cancelling_samples(space) if self.rearrange.is_lossless else super().cancelling_samples(space)

    def rounding_errors(self) -> Tensor:
        return self.base.rounding_errors()

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        return self.base.norm_bounds(space) if self.rearrange.is_lossless else super().norm_bounds(space)

    def upcast(self, dtype: torch.dtype | None = None) -> Factor:
        base, rearrange = self.base.upcast(dtype), self.rearrange
        if base is self.base:
            return self
        if isinstance(rearrange, Cast):  # keep dropping imaginary parts, but do not round
            real = base.dtype.is_complex and not self.dtype.is_complex
            return View(base, self._shape, Cast(base.dtype, base.dtype.to_real())) if real else base
        return View(base, self._shape, rearrange)

    def cache_batch_independent_norms(self, space: Workspace) -> None:
        if self.rearrange.is_lossless:
            self.base.cache_batch_independent_norms(space)
        else:
            super().cache_batch_independent_norms(space)

    @property
    def integer_sum_needs_stack(self) -> bool:
        return not self.rearrange.is_lossless or self.base.integer_sum_needs_stack

    def integer_sum(self, unit: Unit, space: Workspace) -> IntegerSum:
        if not self.rearrange.is_lossless:
            return super().integer_sum(unit, space)
        return RearrangedSum(self.base.integer_sum(unit, space), self.rearrange, is_complex=self.base.dtype.is_complex)

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        if not self.rearrange.is_lossless:
            return super().weighted_sum(weights, space)
        total = self.base.weighted_sum(weights, space)
        return total if isinstance(self.rearrange, Cast) else self.rearrange(total.unsqueeze(0)).squeeze(0)

    def sum_squares(self, center: Tensor | None = None, space: Workspace | None = None) -> Tensor:
        if not self.rearrange.is_lossless or center is not None or self.dtype.is_complex != self.base.dtype.is_complex:
            return super().sum_squares(center, space)
        total = self.base.sum_squares(None, space)
        return total if isinstance(self.rearrange, Cast) else self.rearrange(total.unsqueeze(0)).squeeze(0)

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        return self.base.dot(self.rearrange.adjoint(directions), space)

    def dot_and_sum(self, direction: Tensor, weights: Tensor, space: Workspace | None = None) -> tuple[Tensor, Tensor]:
        if not self.rearrange.is_lossless:
            return super().dot_and_sum(direction, weights, space)
        of_base = self.rearrange.adjoint(direction.unsqueeze(0)).squeeze(0)
        products, total = self.base.dot_and_sum(of_base, weights, space)
        return products, total if isinstance(self.rearrange, Cast) else self.rearrange(total.unsqueeze(0)).squeeze(0)

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        if self.rearrange.is_lossless and isinstance(other, View) and other.rearrange == self.rearrange:
            return self.base.gram(other.base, space)
        return super().gram(other, space)

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        base, rearrange = self.base, self.rearrange
        if self.dtype.is_complex or base.dtype.is_complex:
            return super().compress(left, right, space)
        if isinstance(rearrange, Reshape) or (isinstance(rearrange, Cast) and rearrange.is_lossless):
            return base.compress(left, right, space)
        if rearrange == Permute((1, 0)) and len(left) == self.shape[0]:
            return base.compress(right, left, space).mT
        sides = rearrange.sides(left, right, self.shape)
        return super().compress(left, right, space) if sides is None else base.compress(*sides, space)


class RearrangedSum(IntegerSum):
    """The integer sum of a view: the totals of its base, rearranged."""

    def __init__(self, base: IntegerSum, rearrange: Rearrangement, *, is_complex: bool) -> None:
        self._base, self._rearrange, self._is_complex = base, rearrange, is_complex  # the last is of the base
        self.limits, self.term_sizes = base.limits, base.term_sizes

    def totals(self, weights: Tensor, parts: int = 1, *, at_once: bool = False) -> Tensor:
        total = self._base.totals(weights, parts, at_once=at_once)
        if isinstance(self._rearrange, (Cast, AsComplex)):
            return total  # totals have complex numbers as pairs
        if not self._is_complex:
            return self._rearrange(total)
        return torch.stack([self._rearrange(t) for t in total.unbind(-1)], -1)


class Sum(Factor):
    """The sum of several factors of one shape: tied, reused and recurrent weights."""

    __slots__ = ("terms",)

    def __init__(self, terms: Sequence[Factor]) -> None:
        self.terms = list(terms)

    @property
    def batch(self) -> int:
        return self.terms[0].batch

    @property
    def shape(self) -> Shape:
        return self.terms[0].shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for term in self.terms for t in term.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, [term.dtype for term in self.terms])

    def __getitem__(self, samples: Selection) -> Factor:
        return Sum([term[samples] for term in self.terms])

    def stack(self, out: Tensor | None = None) -> Tensor:
        dtype = wide(self.dtype)
        if dtype != self.dtype and (out is None or out.dtype != dtype):  # half precision is rounded once, at the end
            total = self.stack(torch.empty(self.batch, *self.shape, dtype=dtype, device=self.device))
            return total.to(self.dtype) if out is None else out.copy_(total)
        total = self.terms[0].stack(out)
        if out is None and isinstance(self.terms[0], (Dense, View)):
            total = total.to(self.dtype, copy=True)  # a dense term returns its own storage
        total = total.to(self.dtype) if out is None else total
        for term in self.terms[1:]:
            term.add_to(total)
        return total

    def elements(self, start: int, stop: int) -> Tensor | None:
        total: Tensor | None = None
        for term in self.terms:
            part = term.elements(start, stop)
            if part is None:
                return None
            part = part.to(wide(self.dtype))
            total = part if total is None else total + part
        return total

    def prefers_stack(self, reused: bool) -> bool:
        return tied(self.terms) is None and (reused or beside(_by_rows(self.terms)) is None)

    def _compute_norms(self, space: Workspace) -> Tensor:
        table, both = tied(self.terms), beside(_by_rows(self.terms))
        if table is not None or both is not None:
            norms = without_norms_of_zero(self, self.terms, space)
            if norms is not None:
                return norms
        if table is not None:
            found = tied_norms(*table, space)
        elif both is not None:
            found = norms_of_both(*both, space)
        else:
            return super()._compute_norms(space)
        norms = with_untrusted_recomputed(self, *found, space)
        if hasattr(self, "_cancelling"):
            del self._cancelling  # which misses what cancels within each of the two terms
        return norms

    def term_norms(self) -> Tensor:
        return torch.stack([term.term_norms() for term in self.terms]).sum(0)

    def rounding_errors(self) -> Tensor:
        of_terms = torch.stack([term.rounding_errors() for term in self.terms]).sum(0)
        return of_terms + roundoff(self.dtype, len(self.terms)) * self.term_norms()

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        table = tied(self.terms)
        return super().norm_bounds(space) if table is None else tied_bounds(self.cached_norms(space), *table, space)

    def upcast(self, dtype: torch.dtype | None = None) -> Factor:
        return Sum([term.upcast(dtype) for term in self.terms])

    @property
    def integer_sum_needs_stack(self) -> bool:
        return tied(self.terms) is None and any(term.integer_sum_needs_stack for term in self.terms)

    def integer_sum(self, unit: Unit, space: Workspace) -> IntegerSum:
        if self.integer_sum_needs_stack:
            return super().integer_sum(unit, space)
        in_int64 = replace(unit, dtype=torch.int64)
        return TermsSum([term.integer_sum(in_int64, space) for term in self.terms], self.norm_bounds(space), unit)

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        total = self.terms[0].weighted_sum(weights, space)
        for term in self.terms[1:]:
            total = total + term.weighted_sum(weights, space)
        return total.to(wide(self.dtype))

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        total = self.terms[0].dot(directions, space)
        for term in self.terms[1:]:
            total = total + term.dot(directions, space)
        return total

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        mine, theirs = tied(self.terms), tied(other.terms) if isinstance(other, Sum) else None
        found = tied_gram(mine, theirs, space or Workspace()) if mine is not None and theirs is not None else None
        return super().gram(other, space) if found is None else found

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        total = self.terms[0].compress(left, right, space)
        for term in self.terms[1:]:
            total = total + term.compress(left, right, space)
        return total


def _by_rows(terms: Sequence[Factor]) -> Sequence[Factor]:
    """Outer products and scaled columns, as those and scaled rows of the transposed matrix."""
    if len(terms) != 2:
        return terms
    outer, columns = terms if isinstance(terms[0], Outer) else reversed(terms)
    if not isinstance(outer, Outer) or not isinstance(columns, View) or columns.rearrange != Permute((1, 0)):
        return terms
    return [outer.t(), columns.base]
