"""Sums and views of factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .base import Factor, Shape, deliver
from .outer import Outer, concatenate


class View(Factor):
    """Another factor's gradients, each rearranged, cast or set into zeros by ``apply``: (B, *base) -> (B, *shape)."""

    __slots__ = ("_dtype", "_shape", "apply", "base")

    def __init__(self, base: Factor, shape: Shape, apply: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None):
        self.base, self._shape, self.apply = base, shape, apply
        self._dtype = dtype or base.dtype

    @property
    def batch(self) -> int:
        return self.base.batch

    @property
    def shape(self) -> Shape:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def stack(self, out: Tensor | None = None) -> Tensor:
        return deliver(self.apply(self.base.stack()), out)

    def add_to(self, out: Tensor) -> None:
        out += self.apply(self.base.stack())


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
    def dtype(self) -> torch.dtype:
        return self.terms[0].dtype

    def stack(self, out: Tensor | None = None) -> Tensor:
        total = self.terms[0].stack(out)
        if out is None and not isinstance(self.terms[0], Outer):
            total = total.clone()  # a dense term lends its own storage
        for term in self.terms[1:]:
            term.add_to(total)
        return total


def combine(terms: Sequence[Factor]) -> Factor:
    """The sum of ``terms``: outer products of one form are set one after another in time."""
    outers: dict[tuple[object, ...], list[Outer]] = {}
    rest: list[Factor] = []
    for term in terms:
        if isinstance(term, Outer):
            outers.setdefault((term.left.shape[1:-2], term.shape, term.dtype), []).append(term)
        else:
            rest.append(term)
    merged: list[Factor] = [concatenate(group) if len(group) > 1 else group[0] for group in outers.values()]
    every = merged + rest
    return every[0] if len(every) == 1 else Sum(every)
