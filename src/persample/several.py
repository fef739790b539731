"""Several losses per sample, of shape (B, K…): reductions of all of them, in portions that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._errors import NonFiniteError
from .distributed import Ranks
from .factors import Workspace
from .graph.entry import capture_into
from .graph.several import Collected, Positions, check_samples, count_positions, positions_meet
from .reductions import Call, Reduction, Run
from .reductions.base import is_joined

_LEAST_MEMORY = 2**24  # bytes for the factors of several positions, however small the model


@dataclass(frozen=True)
class Several:
    """One call with losses (B, K…)."""

    losses: Tensor
    params: Mapping[str, Tensor]
    pack: Callable[[Mapping[str, Any]], Any]  # from results by name to a container like that of the parameters
    max_memory: int | None
    ranks: Ranks | None
    retain_graph: bool
    independent: bool

    def reduce(self, reductions: Sequence[Reduction]) -> tuple[Any, ...]:
        """One result for every reduction."""
        joined = [is_joined(reduction) for reduction in reductions]
        whole, found = self.portions(reductions, joined)
        with torch.no_grad():
            each = zip(reductions, joined, found, strict=True)
            return tuple([r.join(portions, whole) if to_join else portions[0] for r, to_join, portions in each])

    def portions(self, reductions: Sequence[Reduction], joined: Sequence[bool]) -> tuple[Call, list[list[Any]]]:
        """The call for all losses, and what each reduction has of every portion: its result, if not ``joined``."""
        whole = self._whole()
        given = [r.for_all(whole) if to_join else r for r, to_join in zip(reductions, joined, strict=True)]
        for reduction in given:
            copy(reduction).start(whole)  # which may refuse what it was given, before any backward
        in_portions = all(joined) and all(r.in_portions for r in given) and self.ranks is None
        found: list[list[Any]] = [[] for _ in given]
        nonfinite: list[Any] = []
        elsewhere = 0
        for run in self._runs(given, in_portions):
            try:
                found = _with_portion(found, run, given, joined)
            except NonFiniteError as error:
                nonfinite += [run.call.index_of(row) for row in error.samples]
                elsewhere = error.elsewhere
        if nonfinite or elsewhere:
            raise NonFiniteError(sorted(nonfinite), self.losses.numel(), elsewhere)
        return whole, found

    def _whole(self) -> Call:
        device, space = self.losses.device, Workspace.on(self.losses.device, self.max_memory)
        shape, positions = tuple(self.losses.shape), range(count_positions(self.losses))
        return Call(self.params, self.losses.numel(), device, self.pack, space, self.ranks, shape, positions)

    def _runs(self, reductions: Sequence[Reduction], in_portions: bool) -> Iterator[Run]:
        """Runs that have got the factors of all losses, each of some positions."""
        if positions_meet(self.losses, self.params):
            yield from self._by_positions(reductions, in_portions)
        else:
            yield self._all_as_samples(reductions)

    def _begin(self, reductions: Sequence[Reduction], positions: range, max_memory: int | None) -> Run:
        batch, shape = len(self.losses) * len(positions), tuple(self.losses.shape)
        device = self.losses.device
        return Run.begin(reductions, self.params, batch, device, self.pack, max_memory, self.ranks, shape, positions)

    def _all_as_samples(self, reductions: Sequence[Reduction]) -> Run:
        """One backward, in which every loss is a sample."""
        if self.independent:
            check_samples(self.losses, self.params)
        run = self._begin(reductions, range(count_positions(self.losses)), self.max_memory)
        with torch.enable_grad():
            every = self.losses.reshape(-1)
        keep = self.retain_graph
        capture_into(every, self.params, run.add, retain_graph=keep, tell_bytes=run.set_default_memory)
        return run

    def _by_positions(self, reductions: Sequence[Reduction], in_portions: bool) -> Iterator[Run]:
        """One backward for each position; the factors of as many as memory allows become one."""
        positions = Positions(self.losses, self.params, independent=self.independent)
        each = positions.activation_bytes()
        memory = max(each, _LEAST_MEMORY) if self.max_memory is None else self.max_memory
        start = 0
        while start < positions.count:
            if in_portions and 2 * each > memory:
                run = self._begin(reductions, range(start, start + 1), self.max_memory)
                run.set_default_memory(each)
                positions.capture(start, run.add, retain_graph=self._keep(positions, start))
                start += 1
            else:
                collected = self._collect(positions, start, memory if in_portions else None)
                left = None if self.max_memory is None else max(0, self.max_memory - collected.nbytes)
                run = self._begin(reductions, range(start, start + collected.count), left)
                run.set_default_memory(each)
                for names, factor in collected.joined():
                    run.add(names, factor)
                start += collected.count
            yield run

    def _collect(self, positions: Positions, start: int, memory: int | None) -> Collected:
        """The factors of some positions, up to the last one with which they fit into memory."""
        collected = Collected()
        for position in range(start, positions.count):
            positions.capture(position, collected.sink(), retain_graph=self._keep(positions, position))
            if memory is not None and collected.bytes_with_another > memory:
                break
        return collected

    def _keep(self, positions: Positions, position: int) -> bool:
        return self.retain_graph or position < positions.count - 1


def _with_portion(
    found: list[list[Any]], run: Run, reductions: Sequence[Reduction], joined: Sequence[bool]
) -> list[list[Any]]:
    """What every reduction has of its portions, with that of another run."""
    portions = [[*own, portion] for own, portion in zip(found, run.portions(joined), strict=True)]
    return [r.condense(own) if len(own) > 1 else own for r, own in zip(reductions, portions, strict=True)]
