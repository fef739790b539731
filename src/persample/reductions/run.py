"""Several reductions on one stream of factors."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from ..factors import Dense, Factor, split
from ..kernels.pages import recycled
from .base import Call, Reduction


class Run:
    """One call: hands every factor to all reductions, written out first where that pays and memory allows."""

    def __init__(self, reductions: Sequence[Reduction], call: Call) -> None:
        self.reductions = [copy(r) for r in reductions]
        self.call = call
        self._space = call.space
        self._written = 0  # bytes that are kept
        self._reused = sum(r.passes for r in reductions) > 1
        self._kept = any(r.keeps_factors for r in reductions)
        for reduction in self.reductions:
            reduction.start(call)

    def add(self, names: Sequence[str], factor: Factor) -> None:
        """The factor of one parameter is complete, or of several: their samples are one parameter's after another's."""
        for name, part in zip(names, split(self._reusable(factor), len(names)), strict=True):
            for reduction in self.reductions:
                reduction.add(name, part)

    def _reusable(self, factor: Factor) -> Factor:
        """The factor in the form that is best asked several times, and kept."""
        if not self._reused or not factor.prefers_stack(reused=True):
            return factor
        size = factor.stack_bytes
        saves = self._kept and size <= factor.nbytes  # less to keep than what the gradients are made from
        if not saves and self._written + size > self._space.limit:
            return factor
        if self._kept and not saves:
            self._written += size
        return Dense(factor.stack(recycled((factor.batch, *factor.shape), factor.dtype, factor.device)))
