"""Where the samples may lie in what a call returned: guesses by size, the likeliest first.

By contract, a result carries the batch in dim 0 (or dim 1), or is a recurrent state. What else fits by size, such as a
dim of B·T, or a tensor below a mean loss, is a guess that needs evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._errors import UnsupportedError
from ..graph.layout import Layout, Shape
from ..graph.read.nodes import NodeSlot
from ..graph.read.roots import Roots, slot_of
from .engine import CallGraph
from .samples import Contradiction, Samples, along

_MOST = 64  # guesses for one set of tensors


class UnknownBatch(UnsupportedError):
    """The samples cannot be told apart in what a call returned."""


@dataclass(frozen=True)
class Guess:
    """One way to start a backward: tensors, and where their samples lie."""

    roots: Roots
    by_contract: Sequence[bool]  # of every root: is this where a result of the call must have its samples?
    usual: bool  # are all samples in the batch dim of the call, also of tensors that are no results?
    returned: bool  # does it start from the results themselves?

    @property
    def beyond_contract(self) -> list[NodeSlot]:
        """The roots of which the contract says nothing."""
        return [slot for slot, certain in zip(self.roots.slots, self.by_contract, strict=True) if not certain]


@dataclass(frozen=True)
class Guesses:
    """All guesses for one backward."""

    samples: Samples
    graph: CallGraph
    results: Mapping[NodeSlot, Tensor]  # and their cotangents

    @classmethod
    def of(cls, samples: Samples, graph: CallGraph, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Guesses:
        """Guesses for the results that a backward came to."""
        return cls(samples, graph, dict(zip([slot_of(y) for y in outputs], grads, strict=True)))

    def __iter__(self) -> Iterator[Iterator[Guess]]:
        """Guesses for one set of tensors after another.

        The first set are the results, or the nearest tensors below those without a batch.
        """
        for slot in self.samples.weights.intersection(self.results):
            raise self._without_samples(slot)
        direct = {slot: self._places(slot, tuple(g.shape)) for slot, g in self.results.items()}
        if all(direct.values()):
            yield self._from(direct)
            return
        passed: set[NodeSlot] = set()
        while starts := self._below(passed):
            yield self._from(starts)
            passed |= {slot for slot in starts if not direct.get(slot)}
            if not passed.intersection(starts):
                return

    def _places(self, slot: NodeSlot, shape: Shape) -> Sequence[Layout]:
        """Where the samples of this tensor may lie: one place, if that is known."""
        known = self.samples.place(slot)
        return self.samples.choices(shape) if known is None else [known]

    def _from(self, starts: Mapping[NodeSlot, Sequence[Layout]]) -> Iterator[Guess]:
        """All guesses for one set of tensors."""
        grads = _cotangents(self.results, starts)
        for layouts in islice(product(*[starts[slot] for slot in grads]), _MOST):
            usual, by_contract = [], []
            for (slot, g), layout in zip(grads.items(), layouts, strict=True):
                state = len(starts[slot]) == 1 and self._may_be_state(tuple(g.shape))
                usual.append(self.samples.place(slot) is not None or self._is_usual(tuple(g.shape), layout))
                by_contract.append(slot in self.results and (usual[-1] or state))
            roots = Roots(list(grads), layouts, self.samples.batch, list(grads.values()))
            yield Guess(roots, by_contract, all(usual), all(slot in self.results for slot in grads))

    def _is_usual(self, shape: Shape, layout: Layout) -> bool:
        """Are the samples in the batch dim of the call?"""
        batch, dim = self.samples.batch, self.samples.dim
        fits = [d for d, n in enumerate(shape) if n == batch and d <= dim]
        if dim == 1 and len(shape) <= 2:  # where time comes first, a matrix may have none, and is B x C
            return len(fits) == 1 and layout == along(shape, fits[0], batch)
        return dim in fits and layout == along(shape, dim, batch)

    def _may_be_state(self, shape: Shape) -> bool:
        """May this be a recurrent state, (layers, B, features)?"""
        return len(shape) == 3 and shape[1] == self.samples.batch

    def _below(self, passed: set[NodeSlot]) -> dict[NodeSlot, Sequence[Layout]]:
        """The nearest tensors that may hold a batch, none of them below another; some are ``passed`` by."""
        passed = set(passed)
        while True:
            nearest = self._nearest(passed)
            upper = {slot for slot in nearest if self.graph.leads_to(slot, nearest)}
            if not upper:
                return nearest
            passed |= upper  # what it leads to would be counted twice

    def _nearest(self, passed: set[NodeSlot]) -> dict[NodeSlot, Sequence[Layout]]:
        graph, starts = self.graph, dict[NodeSlot, Sequence[Layout]]()
        stack, seen = [slot for slot in self.results if graph.holds(slot)], set(self.results)
        while stack:
            slot = stack.pop()
            places = self._places(slot, graph.shape(slot))
            if places and slot not in passed:
                starts[slot] = places
                continue
            below = [other for other in graph.below(slot) if other not in seen]
            if any(map(graph.is_weight, below)):
                raise self._without_samples(slot)
            seen.update(below)
            stack += below
        return starts

    def _without_samples(self, slot: NodeSlot) -> UnknownBatch:
        return UnknownBatch(
            f"parameters are used without any sample ({type(slot[0]).__name__}), as in a penalty on weights, or there "
            f"is no batch of {self.samples.batch} samples in a tensor of shape {self.graph.shape(slot)}: whose "
            f"gradient that is cannot be known. Return one loss per sample, and add such terms outside"
        )


def _cotangents(results: Mapping[NodeSlot, Tensor], starts: Iterable[NodeSlot]) -> dict[NodeSlot, Tensor]:
    """The cotangents of the tensors that a backward starts from: those given, and what comes from results above."""
    cotangents = {slot: g for slot, g in results.items() if slot in starts}
    above = {slot: g for slot, g in results.items() if slot not in starts}
    if above:
        edges, targets = ([GradientEdge(*slot) for slot in slots] for slots in (above, starts))
        extra = torch.autograd.grad(edges, targets, list(above.values()), retain_graph=True, allow_unused=True)
        for slot, g in zip(starts, extra, strict=True):
            if g is not None:
                cotangents[slot] = cotangents[slot] + g if slot in cotangents else g
    return {slot: cotangents[slot] for slot in starts if slot in cotangents}


@dataclass
class Refused:
    """Why guesses were refused, and what that says if none is left."""

    meeting: dict[str, tuple[str, ...]] = field(default_factory=dict)  # ops, by the kind of the guess
    moved: dict[str, None] = field(default_factory=dict)  # functions that put samples elsewhere
    unproven: bool = False  # did one guess lack nothing but evidence?

    def met(self, guess: Guess, ops: tuple[str, ...]) -> None:
        """By this guess, samples meet."""
        self.meeting.setdefault("usual" if guess.usual else "returned" if guess.returned else "below", ops)

    def contradicted(self, guess: Guess, error: Contradiction) -> None:
        """The evidence contradicts this guess, or does not confirm it."""
        self.moved.update({error.op: None} if error.op and all(guess.by_contract) else {})
        self.unproven = self.unproven or error.unproven

    def certain(self) -> tuple[str, ...]:
        """The ops in which samples meet, if no other guess for tensors further below can be right."""
        return self.meeting.get("usual") or (() if self.unproven else self.meeting.get("returned", ()))

    def likeliest(self) -> tuple[str, ...]:
        """The ops in which samples meet, or that put them elsewhere, after all has been tried."""
        return self.meeting.get("below") or tuple(self.moved)
