"""Several reductions on one stream of factors."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from ..factors import Dense, Factor
from .base import Call, Reduction


class Run:
    """One call: hands every factor to all reductions, written out first where that pays and memory allows."""

    def __init__(self, reductions: Sequence[Reduction], call: Call) -> None:
        self.reductions = [copy(r) for r in reductions]
        self._space = call.space
        self._held = 0
        self._reused = sum(r.passes for r in reductions) > 1
        self._holds = any(r.holds for r in reductions)
        for reduction in self.reductions:
            reduction.start(call)

    def add(self, name: str, factor: Factor) -> None:
        """A parameter's factor is complete."""
        factor = self._settled(factor)
        for reduction in self.reductions:
            reduction.add(name, factor)

    def _settled(self, factor: Factor) -> Factor:
        """The factor in the form that is best asked several times, and kept."""
        size = factor.stack_bytes
        cheap = self._holds and size <= factor.nbytes  # less to keep than what the gradients are made from
        if self._reused and (cheap or self._held + size <= self._space.limit) and factor.prefers_stack(reused=True):
            factor = Dense(factor.stack())
        if self._holds:
            self._held += factor.nbytes
        return factor
