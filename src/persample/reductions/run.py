"""Several reductions on one stream of factors."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from ..factors import Dense, Factor, Part
from ..kernels.pages import recycled
from .base import Call, Reduction


class Run:
    """One call: hands every factor to all reductions, written out first where that pays and memory allows."""

    def __init__(self, reductions: Sequence[Reduction], call: Call) -> None:
        self.reductions = [copy(r) for r in reductions]
        self.call = call
        self._space = call.space
        self._written = 0  # bytes that are kept
        self._whole: tuple[Factor, Factor] | None = None  # of the last part, as it came and settled
        self._reused = sum(r.passes for r in reductions) > 1
        self._kept = any(r.keeps_factors for r in reductions)
        for reduction in self.reductions:
            reduction.start(call)

    def add(self, name: str, factor: Factor) -> None:
        """A parameter's factor is complete."""
        factor = self._settled_part(factor) if isinstance(factor, Part) else self._settled(factor)
        for reduction in self.reductions:
            reduction.add(name, factor)

    def _settled_part(self, part: Part) -> Factor:
        """All parts of a whole are settled with it."""
        if self._whole is None or self._whole[0] is not part.whole:
            self._whole = part.whole, self._settled(part.whole)
        settled = self._whole[1]
        return part if settled is part.whole else part.of(settled)

    def _settled(self, factor: Factor) -> Factor:
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
