"""Several losses per sample, of shape (B, K…): reductions of all of them, in portions that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
        whole, portions = self.portions(reductions)
        with torch.no_grad():
            return tuple([r.join(own, whole) for r, own in zip(reductions, portions, strict=True)])

    def portions(self, reductions: Sequence[Reduction]) -> tuple[Call, list[list[Any]]]:
        """The call for all losses, and what every reduction has of its portions."""
        count = count_positions(self.losses)
        device, space = self.losses.device, Workspace.on(self.losses.device, self.max_memory)
        whole = Call(self.params, self.losses.numel(), device, self.pack, space, self.ranks, tuple(self.losses.shape))
        given = [reduction.for_all(whole) for reduction in reductions]
        if not positions_meet(self.losses, self.params):
            runs = iter([self._all_as_samples(given, range(count))])
        else:
            all_at_once = self.ranks is not None or not all(r.in_portions for r in given)
            runs = self._by_positions(given, all_at_once)
        found: list[list[Any]] = [[] for _ in given]
        nonfinite: list[Any] = []
        for run in runs:
            try:
                for i, (reduction, portion) in enumerate(zip(given, run.portions(), strict=True)):
                    found[i].append(portion)
                    found[i] = reduction.condense(found[i])
            except NonFiniteError as error:
                if error.elsewhere:
                    raise
                nonfinite += [run.call.index_of(row) for row in error.samples]
        if nonfinite:
            raise NonFiniteError(sorted(nonfinite), self.losses.numel())
        return whole, found

    def _begin(self, reductions: Sequence[Reduction], positions: range, max_memory: int | None) -> Run:
        batch, shape = len(self.losses) * len(positions), tuple(self.losses.shape)
        device = self.losses.device
        return Run.begin(reductions, self.params, batch, device, self.pack, max_memory, self.ranks, shape, positions)

    def _all_as_samples(self, reductions: Sequence[Reduction], positions: range) -> Run:
        """One backward, in which every loss is a sample."""
        if self.independent:
            check_samples(self.losses, self.params)
        run = self._begin(reductions, positions, self.max_memory)
        with torch.enable_grad():
            every = self.losses.reshape(-1)
        keep = self.retain_graph
        capture_into(every, self.params, run.add, retain_graph=keep, tell_bytes=run.set_default_memory)
        return run

    def _by_positions(self, reductions: Sequence[Reduction], all_at_once: bool) -> Iterator[Run]:
        """One backward for each position; the factors of as many as memory allows become one."""
        positions = Positions(self.losses, self.params, independent=self.independent)
        each = positions.activation_bytes()
        memory = max(each, _LEAST_MEMORY) if self.max_memory is None else self.max_memory
        start = 0
        while start < positions.count:
            if not all_at_once and 2 * each > memory:
                run = self._begin(reductions, range(start, start + 1), self.max_memory)
                run.set_default_memory(each)
                positions.capture(start, run.add, retain_graph=self._keep(positions, start))
                start += 1
            else:
                collected = self._collect(positions, start, None if all_at_once else memory)
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
