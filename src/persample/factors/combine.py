"""Sums and views of factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from ..kernels.norms import wide
from .base import Factor, Selection, Shape, deliver
from .deferred import Deferred
from .dense import Dense
from .exact import Exact, Several
from .limits import Unit, roundoff
from .outer import Outer
from .rearrange import AsComplex, Cast, Rearrangement, Reshape
from .rows import Rows
from .tied import tied, tied_bounds, tied_norms
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
        return deliver(self.rearrange(self.base.stack()), out)

    def add_to(self, out: Tensor) -> None:
        out += self.rearrange(self.base.stack())

    def elements(self, start: int, stop: int) -> Tensor | None:
        plain = isinstance(self.rearrange, Reshape) or (isinstance(self.rearrange, Cast) and self.rearrange.is_lossless)
        found = self.base.elements(start, stop) if plain else None
        return None if found is None else found.to(self.dtype)

    def take_norms(self, norms: Tensor) -> None:
        super().take_norms(norms)
        if self.rearrange.is_lossless:
            self.base.take_norms(norms)

    @property
    def cancels(self) -> bool:
        return self.rearrange.is_lossless and self.base.cancels

    def prefers_stack(self, reused: bool) -> bool:
        return self.base.prefers_stack(reused) if self.rearrange.is_lossless else True

    def _compute_norms(self, space: Workspace) -> Tensor:
        return self.base.norms(space) if self.rearrange.is_lossless else super()._compute_norms(space)

    def sizes(self) -> Tensor:
        return self.base.sizes() if self.rearrange.is_lossless else self.norms()

    def imprecise(self, space: Workspace | None = None) -> Tensor:
        return self.base.imprecise(space) if self.rearrange.is_lossless else super().imprecise(space)

    def rounding(self) -> Tensor:
        return self.base.rounding()

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        return self.base.norm_bounds(space) if self.rearrange.is_lossless else super().norm_bounds(space)

    def widened(self, dtype: torch.dtype | None = None) -> Factor:
        base, rearrange = self.base.widened(dtype), self.rearrange
        if base is self.base:
            return self
        if isinstance(rearrange, Cast):  # which may leave out imaginary parts, but rounds no more
            real = base.dtype.is_complex and not self.dtype.is_complex
            return View(base, self._shape, Cast(base.dtype, base.dtype.to_real())) if real else base
        return View(base, self._shape, rearrange)

    def measure(self, space: Workspace) -> None:
        if self.rearrange.is_lossless:
            self.base.measure(space)
        else:
            super().measure(space)

    @property
    def rounds_written(self) -> bool:
        return not self.rearrange.is_lossless or self.base.rounds_written

    def exact(self, unit: Unit, space: Workspace) -> Exact:
        if not self.rearrange.is_lossless:
            return super().exact(unit, space)
        return Moved(self.base.exact(unit, space), self.rearrange, is_complex=self.base.dtype.is_complex)

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

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        if self.rearrange.is_lossless and isinstance(other, View) and other.rearrange == self.rearrange:
            return self.base.gram(other.base, space)
        return super().gram(other, space)


class Moved(Exact):
    """Gradients with their elements in other places."""

    def __init__(self, base: Exact, rearrange: Rearrangement, *, is_complex: bool) -> None:
        self._base, self._rearrange, self._is_complex = base, rearrange, is_complex  # whether the base is
        self.limits = base.limits

    def totals(self, weights: Tensor, parts: int = 1) -> Tensor:
        total = self._base.totals(weights, parts)
        if isinstance(self._rearrange, (Cast, AsComplex)):
            return total  # complex numbers are pairs already
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
        total = self.terms[0].stack(out)
        if out is None and isinstance(self.terms[0], (Dense, View)):
            total = total.to(self.dtype, copy=True)  # a dense term lends its own storage
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
            total = part if total is None else total + part
        return total

    def prefers_stack(self, reused: bool) -> bool:
        return tied(self.terms) is None

    def _compute_norms(self, space: Workspace) -> Tensor:
        both = tied(self.terms)
        if both is None:
            return super()._compute_norms(space)
        norms = self.checked(*tied_norms(*both, space), space)
        del self._imprecise  # both terms may have hidden what cancels in each
        return norms

    def sizes(self) -> Tensor:
        return torch.stack([term.sizes() for term in self.terms]).sum(0)

    def rounding(self) -> Tensor:
        terms = torch.stack([term.rounding() for term in self.terms]).sum(0)
        added = torch.stack([term.sizes() for term in self.terms]).sum(0)
        return terms + roundoff(self.dtype, len(self.terms)) * added

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        both = tied(self.terms)
        return super().norm_bounds(space) if both is None else tied_bounds(self.own_norms(space), *both, space)

    def widened(self, dtype: torch.dtype | None = None) -> Factor:
        return Sum([term.widened(dtype) for term in self.terms])

    @property
    def rounds_written(self) -> bool:
        return tied(self.terms) is None and any(term.rounds_written for term in self.terms)

    def exact(self, unit: Unit, space: Workspace) -> Exact:
        if self.rounds_written:
            return super().exact(unit, space)
        long = replace(unit, dtype=torch.int64)
        return Several([term.exact(long, space) for term in self.terms], self.norm_bounds(space), unit)

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

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        total = self.terms[0].compress(left, right, space)
        for term in self.terms[1:]:
            total = total + term.compress(left, right, space)
        return total


def combine(terms: Sequence[Factor]) -> Factor:
    """The sum of ``terms``: those of one form are set one after another in time."""
    if len(terms) == 1:
        return terms[0]
    terms = [term.whole() if isinstance(term, Deferred) else term for term in terms]  # so that it can be put together
    alike: dict[object, list[Factor]] = {}
    for position, term in enumerate(terms):
        alike.setdefault(_form(term, position), []).append(term)
    every = [_concatenated(group) if len(group) > 1 else group[0] for group in alike.values()]
    return every[0] if len(every) == 1 else Sum(every)


def _form(term: Factor, position: int) -> object:
    """What terms have in common that can be concatenated; others stay alone."""
    if isinstance(term, Outer):
        return Outer, term.left.shape[1:-2], term.shape, term.dtype
    return (Rows, term.shape, term.dtype) if isinstance(term, Rows) else position


def _concatenated(group: Sequence[Factor]) -> Factor:
    outers = [f for f in group if isinstance(f, Outer)]
    return Outer.concatenate(outers) if outers else Rows.concatenate([f for f in group if isinstance(f, Rows)])
