"""Where the samples of a call lie, as far as it is known.

The evidence is what is known of the results of functions that were given the call's data. By it, guesses where samples
lie in the results of the call are checked, and samples that have met are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._errors import InteractionError
from ..graph.execute.plan import CapturePlan
from ..graph.layout import Block, Labels, Layout, Shape, carry, join, strides
from ..graph.read.nodes import NodeSlot
from ..graph.read.roots import slot_of
from ..graph.read.site import Flow
from .engine import CallGraph, counts_positions, located, rests_on, shape_of

_TRIES = 64  # guesses for one set of tensors
if TYPE_CHECKING:
    from .data import Notes

_NO_PLACE = Block(0, 0)


class Contradiction(Exception):
    """A guess contradicts the evidence, or goes beyond the contract and is not confirmed by any (``unproven``).

    ``op`` is the function that moved samples to where the guess does not have them, if there is one.
    """

    def __init__(self, op: str | None = None, unproven: bool = False) -> None:
        super().__init__(op)
        self.op, self.unproven = op, unproven


class Finding(NamedTuple):
    """What is known of one result inside of a call.

    A layout alone: its samples lie so. With ``op``: because that function put them elsewhere than in a dim of their
    own. An ``op`` alone: it has put several samples into a result without a batch, which no sample may use. With
    ``meet``: samples have met before, in data. Nothing: nothing is known.
    """

    layout: Layout | None = None
    op: str | None = None
    meet: bool = False


@dataclass(slots=True)
class Samples:
    """What is known of the samples of one call."""

    batch: int
    dim: int  # of the batch, in inputs and results
    inputs: Sequence[Tensor] = ()  # of the call, those with a batch
    packed: PackedSequence | None = None  # the call's one packed input, if it has one
    notes: Notes | None = None  # of what was done to the inputs, until they have been looked at
    evidence: dict[NodeSlot, Finding] = field(default_factory=dict)
    weights: set[NodeSlot] = field(default_factory=set)  # results that were computed from weights alone
    tables: Sequence[NodeSlot] = ()  # computed from weights, and from constants to which no input has contributed

    def knows(self, tensor: Tensor) -> bool:
        """Has it been told where this tensor's samples lie?"""
        return slot_of(tensor) in self.evidence

    def tell(self, tensor: Tensor, layout: Layout) -> None:
        """The samples of this tensor lie so."""
        if tensor.requires_grad:
            self.evidence[slot_of(tensor)] = Finding(layout)

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

    def learn(self, graph: CallGraph) -> None:
        """Look at the data of the call, once; raises if samples have met in any that this ``graph`` has used."""
        if self.notes is not None:
            for slot, finding in self.notes.evidence(self.choices, self.evidence).items():
                told = self.place(slot)
                shown = finding.layout
                agrees = told is not None and shown is not None and join(told, shown, shape_of(slot)) is not None
                if finding != Finding() and not agrees:
                    self.evidence[slot] = finding
            self.tables, self.notes = self.notes.origins.tables(), None
            if all(self.place(slot) is None for slot in self.evidence):  # a function may hide others
                self._look_inside(graph)
        if ops := [op for slot, (_, op, meet) in self.evidence.items() if meet and op and graph.holds(slot)]:
            raise interaction(ops)

    def _look_inside(self, graph: CallGraph) -> None:
        """Ops that were given an input of the call, though no function of weights was seen to be."""
        for slot, x, kept in graph.saved_data():
            layout = self.of_input(x)
            there = None if layout is None else carry(layout, tuple(x.shape), shape_of(slot), kept)
            if there is not None:
                self.evidence.setdefault(slot, Finding(there))

    def place(self, slot: NodeSlot) -> Layout | None:
        """Where the samples of this tensor lie, if that is known and no function has moved them."""
        known = self.evidence.get(slot, Finding())
        return None if known.op else known.layout

    def known(self) -> dict[NodeSlot, Layout]:
        """The evidence, as far as it decides how a guess is judged."""
        return {slot: f.layout or _NO_PLACE for slot, f in self.evidence.items()}

    def verify(self, plan: CapturePlan, beyond_contract: Sequence[NodeSlot]) -> None:
        """Refuse a plan that contradicts the evidence, or lacks some for a ``beyond_contract`` start."""
        agreed = self.compare(plan)
        if not all(rests_on(plan, slot, agreed) for slot in beyond_contract):
            raise Contradiction(unproven=True)

    def compare(self, plan: CapturePlan, may_meet: bool = False) -> list[NodeSlot]:
        """Where a plan agrees with the evidence; raises if it does not. Samples ``may_meet`` in it."""
        agreed, used = [], []
        for slot, (layout, op, _) in self.evidence.items():
            place = located(plan, slot)
            if place is None:
                continue
            shape = shape_of(slot)
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
