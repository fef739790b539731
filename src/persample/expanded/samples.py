"""Where the samples of a call lie: what is known of it, and guesses that are checked by it.

By contract, a result carries the batch in dim 0 (or dim 1), or is a recurrent state. What else fits by size, such as a
dim of B·T, or a tensor below a mean loss, is a guess. Every guess must agree with the evidence: what is known of the
results of functions that were given the call's data. Where a guess goes beyond the contract, there must be some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.utils.rnn import PackedSequence

from .._errors import InteractionError, UnsupportedError
from ..graph.layout import Block, Labels, Layout, Shape, carry, join, strides
from ..graph.plan import Plan
from ..graph.roots import Roots, slot_of
from ..graph.site import Flow
from ..graph.tape import Slot
from .engine import Graph, counts_positions, located, rests_on, shape_in

_TRIES = 64  # guesses for one set of tensors
_NO_PLACE = Block(0, 0)


class UnknownBatch(UnsupportedError):
    """The samples cannot be told apart in what a call returned."""


class Contradiction(Exception):
    """A guess contradicts the evidence, or goes beyond the contract and is not confirmed by any (``unproven``).

    ``op`` is the function that moved samples to where the guess does not have them, if there is one.
    """

    def __init__(self, op: str | None = None, unproven: bool = False) -> None:
        super().__init__(op)
        self.op, self.unproven = op, unproven


class Found(NamedTuple):
    """What is known of one result inside of a call.

    A layout alone: its samples lie so. With ``op``: because that function put them elsewhere than in a dim of their
    own. An ``op`` alone: it has put several samples into a result without a batch, which no sample may use. With
    ``meet``: samples have met before, in data. Nothing: nothing is known.
    """

    layout: Layout | None = None
    op: str | None = None
    meet: bool = False


class Data(Protocol):
    """Data that were computed from the inputs of a call, and went into functions of weights."""

    def found(self, choices: Callable[[Shape], Sequence[Layout]], known: Mapping[Slot, Found]) -> dict[Slot, Found]:
        """What is to be known of the results of these functions; those of unchanged inputs may be ``known``."""

    def tables(self) -> Sequence[Slot]:
        """What was computed from weights and constants to which no input has contributed."""


@dataclass(frozen=True)
class Guess:
    """One way to start a backward: tensors, and where their samples lie."""

    roots: Roots
    by_contract: Sequence[bool]  # of every root: is this where a result of the call must have its samples?
    usual: bool  # are all samples in the batch dim of the call, also of tensors that are no results?
    returned: bool  # does it start from the results themselves?


@dataclass(slots=True)
class Samples:
    """What is known of the samples of one call."""

    batch: int
    dim: int  # of the batch, in inputs and results
    inputs: Sequence[Tensor] = ()  # of the call, those with a batch
    packed: PackedSequence | None = None  # the call's one packed input, if it has one
    data: Data | None = None  # computed from the inputs, until it has been looked at
    evidence: dict[Slot, Found] = field(default_factory=dict)
    weights: set[Slot] = field(default_factory=set)  # results that were computed from weights alone
    tables: Sequence[Slot] = ()

    def knows(self, tensor: Tensor) -> bool:
        """Has it been told where this tensor's samples lie?"""
        return slot_of(tensor) in self.evidence

    def tell(self, tensor: Tensor, layout: Layout) -> None:
        """The samples of this tensor lie so."""
        if tensor.requires_grad:
            self.evidence[slot_of(tensor)] = Found(layout)

    def tell_dim(self, tensor: Tensor, dim: int) -> None:
        """The samples of this tensor lie in one dim, if it has the size of the batch."""
        if tensor.ndim > dim and tensor.shape[dim] == self.batch:
            self.tell(tensor, along(tensor.shape, dim, self.batch))

    def of_input(self, t: Tensor) -> Layout | None:
        """Where the samples lie in one of the call's inputs, or in a reshape of it, which leaves them as they are."""
        for x in self.inputs if self.batch > 1 else ():
            if t is x or _is_reshape(t, x):
                return along(x.shape, self.dim, self.batch)
        return None

    def learn(self, graph: Graph) -> None:
        """Look at the data of the call, once; raises if samples have met in them."""
        if self.data is None:
            return
        found = {slot: f for slot, f in self.data.found(self.choices, self.evidence).items() if graph.holds(slot)}
        if ops := [f.op for f in found.values() if f.meet and f.op]:
            raise interaction(ops)
        self.tables, self.data = self.data.tables(), None
        for slot, f in found.items():
            told = self.place(slot)
            agrees = told is not None and f.layout is not None and join(told, f.layout, graph.shape(slot)) is not None
            if f != Found() and not agrees:
                self.evidence[slot] = f
        if all(self.place(slot) is None for slot in self.evidence):  # a function may hide others
            for slot, x, kept in graph.saved_data():
                layout = self.of_input(x)
                there = None if layout is None else carry(layout, tuple(x.shape), graph.shape(slot), kept)
                if there is not None:
                    self.evidence.setdefault(slot, Found(there))

    def place(self, slot: Slot) -> Layout | None:
        """Where the samples of this tensor lie, if that is known and no function has moved them."""
        found = self.evidence.get(slot, Found())
        return None if found.op else found.layout

    def known(self) -> dict[Slot, Layout]:
        """The evidence, as far as it decides how a guess is judged."""
        return {slot: f.layout or _NO_PLACE for slot, f in self.evidence.items()}

    def verify(self, plan: Plan, guess: Guess, follow: bool) -> None:
        """Refuse a guess that contradicts the evidence, or that lacks some and needs it.

        It is needed beyond the contract; with ``follow``, for everything, if there is any.
        """
        agreed = self.compare(plan)
        for slot, by_contract in zip(guess.roots.slots, guess.by_contract, strict=True):
            needed = not by_contract or (follow and bool(self.evidence))
            if needed and not rests_on(plan, slot, agreed):
                raise Contradiction(unproven=True)

    def compare(self, plan: Plan, may_meet: bool = False) -> list[Slot]:
        """Where a plan agrees with the evidence; raises if it does not. Samples ``may_meet`` in it."""
        agreed, used = [], []
        for slot, (layout, op, _) in self.evidence.items():
            place = located(plan, slot)
            if place is None:
                continue
            shape = shape_in(plan, slot)
            if layout is None:
                used.append(str(op))
            elif isinstance(place, Layout):
                if join(place, layout, shape) is None:
                    raise Contradiction(op)
                agreed.append(slot)
            elif not may_meet and not (place is Flow.SHARED and self.choices(shape) and counts_positions(slot)):
                raise Contradiction(op)
        if used and not may_meet:
            raise interaction(used)
        return agreed

    def choices(self, shape: Shape) -> list[Layout]:
        """All places in which the samples may lie, the likeliest first."""
        dims = sorted(range(len(shape)), key=lambda d: (d != self.dim, d))
        exact: list[Layout] = [along(shape, d, self.batch) for d in dims if shape[d] == self.batch]
        folded: list[Layout] = []
        for d in range(len(shape)):
            if shape[d] > self.batch and shape[d] % self.batch == 0:
                both = [along(shape, d, self.batch), Block(self.batch, strides(tuple(shape))[d])]
                folded += both if self.dim == 0 else both[::-1]
        return exact + folded

    def guesses(self, outputs: Sequence[Tensor], grads: Sequence[Tensor], graph: Graph) -> Iterator[Iterator[Guess]]:
        """Guesses for one set of tensors after another, the likeliest first.

        The first set are the results, or the nearest tensors below those without a batch.
        """
        results = dict(zip([slot_of(y) for y in outputs], grads, strict=True))
        for slot in self.weights.intersection(results):
            raise self._without_samples(graph, slot)
        direct = {slot: self._places(slot, tuple(g.shape)) for slot, g in results.items()}
        if all(direct.values()):
            yield self._guesses(results, direct)
            return
        passed: set[Slot] = set()
        while starts := self._below(graph, results, passed):
            yield self._guesses(results, starts)
            passed |= {slot for slot in starts if not direct.get(slot)}
            if not passed.intersection(starts):
                return

    def _places(self, slot: Slot, shape: Shape) -> list[Layout]:
        """Where the samples of this tensor may lie: one place, if that is known."""
        known = self.place(slot)
        return self.choices(shape) if known is None else [known]

    def _guesses(self, results: Mapping[Slot, Tensor], starts: Mapping[Slot, list[Layout]]) -> Iterator[Guess]:
        """All guesses for one set of tensors."""
        cotangents = _cotangents(results, starts)
        slots, grads = list(cotangents), list(cotangents.values())
        for layouts in islice(product(*[starts[slot] for slot in slots]), _TRIES):
            usual = [
                self.place(slot) is not None or self._is_usual(tuple(g.shape), layout)
                for (slot, g), layout in zip(cotangents.items(), layouts, strict=True)
            ]
            by_contract = [
                slot in results and (is_usual or (len(starts[slot]) == 1 and self._may_be_state(tuple(g.shape))))
                for (slot, g), is_usual in zip(cotangents.items(), usual, strict=True)
            ]
            returned = all(slot in results for slot in slots)
            yield Guess(Roots(slots, layouts, self.batch, grads), by_contract, all(usual), returned)

    def _is_usual(self, shape: Shape, layout: Layout) -> bool:
        """Are the samples in the batch dim of the call?"""
        fits = [d for d, n in enumerate(shape) if n == self.batch and d <= self.dim]
        if self.dim == 1 and len(shape) <= 2:  # where time comes first, a matrix may have none, and is B x C
            return len(fits) == 1 and layout == along(shape, fits[0], self.batch)
        return self.dim in fits and layout == along(shape, self.dim, self.batch)

    def _may_be_state(self, shape: Shape) -> bool:
        """May this be a recurrent state, (layers, B, features)?"""
        return len(shape) == 3 and shape[1] == self.batch

    def _below(self, graph: Graph, results: Iterable[Slot], passed: set[Slot]) -> dict[Slot, list[Layout]]:
        """The nearest tensors that may hold a batch, none of them below another; some are ``passed`` by."""
        passed = set(passed)
        while True:
            found = self._nearest(graph, results, passed)
            upper = {slot for slot in found if graph.leads_to(slot, found)}
            if not upper:
                return found
            passed |= upper  # what it leads to would be counted twice

    def _nearest(self, graph: Graph, results: Iterable[Slot], passed: set[Slot]) -> dict[Slot, list[Layout]]:
        found: dict[Slot, list[Layout]] = {}
        stack, seen = [slot for slot in results if graph.holds(slot)], set(results)
        while stack:
            slot = stack.pop()
            places = self._places(slot, graph.shape(slot))
            if places and slot not in passed:
                found[slot] = places
                continue
            below = [other for other in graph.below(slot) if other not in seen]
            if any(map(graph.is_weight, below)):
                raise self._without_samples(graph, slot)
            seen.update(below)
            stack += below
        return found

    def _without_samples(self, graph: Graph, slot: Slot) -> UnknownBatch:
        return UnknownBatch(
            f"parameters are used without any sample ({type(slot[0]).__name__}), as in a penalty on weights, or there "
            f"is no batch of {self.batch} samples in a tensor of shape {graph.shape(slot)}: whose gradient that is "
            f"cannot be known. Return one loss per sample, and add such terms outside"
        )


def _cotangents(results: Mapping[Slot, Tensor], starts: Iterable[Slot]) -> dict[Slot, Tensor]:
    """The cotangents of the tensors that a backward starts from: those given, and what comes from results above."""
    found = {slot: g for slot, g in results.items() if slot in starts}
    above = {slot: g for slot, g in results.items() if slot not in starts}
    if above:
        edges, targets = ([GradientEdge(*slot) for slot in slots] for slots in (above, starts))
        extra = torch.autograd.grad(edges, targets, list(above.values()), retain_graph=True, allow_unused=True)
        for slot, g in zip(starts, extra, strict=True):
            if g is not None:
                found[slot] = found[slot] + g if slot in found else g
    return {slot: found[slot] for slot in starts if slot in found}


def interaction(ops: Iterable[str]) -> InteractionError:
    """Samples meet in these functions; the message is written where the call is known."""
    error = InteractionError()
    error.ops = tuple(dict.fromkeys(ops))
    return error


def along(shape: Sequence[int], dim: int, batch: int) -> Block:
    """The samples are dim ``dim``, or its outer part where it is larger than the batch."""
    step = strides(tuple(shape))[dim]
    return Block(batch, step * max(shape[dim] // batch, 1)) if batch else Block(0, step)


def of_packed(batch_sizes: Tensor, order: Tensor | None, data: Tensor, batch: int) -> Layout:
    """The samples of a packed sequence: at every step the first so many of ``order``."""
    order = torch.arange(batch, device="cpu") if order is None else order.cpu()
    index = torch.cat([order[:n] for n in batch_sizes.tolist()])
    return Labels(batch, index.reshape([-1, *[1] * (data.ndim - 1)]))


def _is_reshape(t: Tensor, x: Tensor) -> bool:
    """Are these the same elements in the same order, at the same place of the memory?"""
    if type(t) is not Tensor or t.numel() != x.numel() or not (t.is_contiguous() and x.is_contiguous()):
        return False
    try:
        return t.data_ptr() == x.data_ptr() != 0
    except (NotImplementedError, RuntimeError):  # tensors of transforms have no memory
        return False
