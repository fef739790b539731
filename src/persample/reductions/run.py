"""A run: one call of `reduce`, in which several reductions are given every factor that the backward makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..distributed import Ranks
from ..factors import Dense, Factor, Workspace, split
from ..factors.dense import is_worth_writing_out
from ..kernels.certificates import is_traced
from ..kernels.devices import launches_cost
from ..kernels.differentiable import grad_mode, is_differentiable
from ..kernels.pages import POOL, recycled
from ..numberless import faking
from .base import Call, Reduction

_LEAST_MEMORY = 2**22  # bytes for temporaries, however small the model
_ACCELERATORS_LEAST = 2**26  # the same where chunks cost launches
_SOME_SAMPLES = 32


class Run:
    """Gives every factor to all reductions, written out first where that is faster and memory allows."""

    def __init__(self, reductions: Sequence[Reduction], call: Call, *, memory_is_given: bool = True) -> None:
        self.given = reductions
        self.reductions = [copy(r) for r in reductions]
        self.call = call
        self._space = call.space
        self._memory_is_given = memory_is_given
        self._kept_bytes = 0  # of gradients that are written out and kept
        self._reused = sum(r.passes for r in reductions) > 1
        self._takes_stacks = all(r.takes_stacks for r in reductions)
        self._keeps_factors = any(r.keeps_factors for r in reductions)
        for reduction in self.reductions:
            reduction.start(call)

    @classmethod
    def begin(
        cls,
        reductions: Sequence[Reduction],
        params: Mapping[str, Tensor],
        batch: int,
        device: torch.device,
        pack: Callable[[Mapping[str, Any]], Any],
        max_memory: int | None = None,
        ranks: Ranks | None = None,
        losses: tuple[int, ...] | None = None,
        positions: range | None = None,
    ) -> Run:
        """The run of a new call, whose temporaries reuse memory of earlier calls."""
        POOL.begin_call()
        call = Call(params, batch, device, pack, Workspace.on(device, max_memory), ranks, losses, positions)
        return cls(reductions, call, memory_is_given=max_memory is not None)

    def set_default_memory(self, activation_bytes: int) -> int:
        """Let temporaries take as much memory as the forward pass has kept, unless the caller has given a bound.

        How much they may take is returned.
        """
        if not self._memory_is_given:
            least = _ACCELERATORS_LEAST if launches_cost(self.call.device) else _LEAST_MEMORY
            if is_traced():  # what is kept is to be the same for all batch sizes
                least = least // _SOME_SAMPLES * self.call.batch
            self._space.limit = max(activation_bytes, least)
        return self._space.limit

    def add(self, names: Sequence[str], factor: Factor) -> None:
        """Take the complete factor of one parameter, or of several, whose samples follow one another (`Part`)."""
        if (
            len(names) == 1
            and self._takes_stacks
            and is_worth_writing_out(factor)
            and self._has_room(factor, waits=True)
        ):
            factor = Dense(factor.stack())
        for name, part in zip(names, split(self._written_out_if_it_pays(factor), len(names)), strict=True):
            for reduction in self.reductions:
                reduction.add(name, part)

    def results(self) -> tuple[Any, ...]:
        """One result per reduction, after the backward."""
        with grad_mode():
            return tuple([reduction.result() for reduction in self.reductions])

    def portions(self, joined: Sequence[bool]) -> list[Any]:
        """What every reduction has of this portion of a call; the result itself of those that are not ``joined``."""
        with torch.no_grad():
            return [r.portion() if to_join else r.result() for r, to_join in zip(self.reductions, joined, strict=True)]

    def _written_out_if_it_pays(self, factor: Factor) -> Factor:
        """The factor for all reductions: written out if several passes are faster then, and memory allows."""
        if not self._reused or not factor.prefers_stack(reused=True):
            return factor
        if not self._has_room(factor, waits=self._keeps_factors):
            return factor
        out = (
            None
            if faking() or is_differentiable()
            else recycled((factor.batch, *factor.shape), factor.dtype, factor.device)
        )
        return Dense(factor.stack(out))

    def _has_room(self, factor: Factor, *, waits: bool) -> bool:
        """Is there memory for the gradients written out? If they wait for the end of the backward, they are counted."""
        size = factor.stack_bytes
        if self._keeps_factors and size <= factor.nbytes:  # less to keep than what the gradients are made from
            return True
        if self._kept_bytes + size > self._space.limit:
            return False
        self._kept_bytes += size if waits else 0
        return True
