"""Where the samples lie in the results of a call.

It is promised that a result carries the batch in dim 0 (or dim 1), or is a recurrent state. What else fits by size,
such as a dim of B·T, or a tensor below a mean loss, is a guess, and counts only if it agrees with what is known inside:
the result of a layer that was given one of the call's inputs, or data computed from them, carries its samples where
the data do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn.utils.rnn import PackedSequence

from .._errors import InteractionError
from ..graph.layout import Block, Labels, Layout, Shape, carry, join, strides
from ..graph.nodes import NodeSlot
from ..graph.plan import CapturePlan
from ..graph.roots import Roots, slot_of
from ..graph.rows import only_counts
from ..graph.saved import in_checkpoint, tensor
from ..graph.site import Flow, weights_only
from ..graph.tape import Tape
from .verdicts import Data, Disagreement, Reading, UnknownBatch, Verdict

_TRIES = 64  # readings of one set of tensors
_Start = tuple[NodeSlot, Tensor, list[Layout]]  # a place to start from, its cotangent, and where its samples may lie


@dataclass(slots=True)
class Samples:
    """What is known of the samples of one call."""

    batch: int
    dim: int  # of the batch, in inputs and results
    known: dict[NodeSlot, Layout] = field(default_factory=dict)
    moved: dict[NodeSlot, Verdict] = field(
        default_factory=dict
    )  # data whose samples are in another order, or in many dims
    pooled: dict[NodeSlot, Verdict] = field(
        default_factory=dict
    )  # results in which samples have met, or some of them lie
    shared: set[NodeSlot] = field(default_factory=set)  # results that were computed from weights alone
    tables: Sequence[NodeSlot] = ()  # computed from weights, and from constants that no input went into
    inputs: Sequence[Tensor] = ()  # of the call, those with a batch
    data: Data | None = None  # computed from them
    packed: PackedSequence | None = None  # the call's one packed input, if it has one

    def knows(self, tensor: Tensor) -> bool:
        """Has it been told where this tensor's samples lie?"""
        return slot_of(tensor) in self.known

    def tell(self, tensor: Tensor, layout: Layout) -> None:
        """The samples of this tensor lie so."""
        if tensor.requires_grad:
            self.known[slot_of(tensor)] = layout

    def tell_dim(self, tensor: Tensor, dim: int) -> None:
        """The samples of this tensor lie in one dim, if it has the size of the batch."""
        if tensor.ndim > dim and tensor.shape[dim] == self.batch:
            self.tell(tensor, along(tensor.shape, dim, self.batch))

    def of_input(self, t: Tensor) -> Layout | None:
        """Where the samples lie in one of the call's inputs, or in a view of it."""
        if self.batch < 2 or type(t) is not Tensor:
            return None
        for x in self.inputs:
            if not _shares_storage(t, x) or not x.is_contiguous():
                continue
            step, apart = x.stride(self.dim), t.storage_offset() - x.storage_offset()
            if t.is_contiguous() and t.numel() == x.numel() and not apart:
                return along(x.shape, self.dim, self.batch)  # a reshape leaves it as it is
            dims = [d for d in range(t.ndim) if (t.shape[d], t.stride(d)) == (self.batch, step)]
            if len(dims) == 1 and t.numel() and apart // step % self.batch == 0:
                return along(t.shape, dims[0], self.batch)
        return None

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

    def _promised(self, shape: Shape, layout: Layout) -> bool:
        fits = [d for d, n in enumerate(shape) if n == self.batch and d <= self.dim]
        if self.dim == 1 and len(shape) <= 2:  # where time comes first, a matrix may have none, and is B x C
            return len(fits) == 1 and layout == along(shape, fits[0], self.batch)
        return self.dim in fits and layout == along(shape, self.dim, self.batch)

    def readings(self, outputs: Sequence[Tensor], grads: Sequence[Tensor], tape: Tape) -> Iterator[Iterator[Reading]]:
        """Every way to start a backward, the likeliest first: from the results, or from below those without a batch.

        ``tape`` leads from the results to weights and inputs.
        """
        tops = list(zip([slot_of(y) for y in outputs], grads, strict=True))
        for slot, _ in tops:
            if slot in self.shared:
                raise self._without_samples(tape, slot)
        direct = {slot: self._places(slot, tuple(g.shape)) for slot, g in tops}
        if all(direct.values()):
            yield self._read(tops, direct)
            return
        unfit: set[NodeSlot] = set()
        while cut := self._cut(tape, tops, unfit):
            yield self._read(tops, cut)
            unfit |= {slot for slot in cut if not direct.get(slot)}
            if not unfit.intersection(cut):
                return

    def _places(self, slot: NodeSlot, shape: Shape) -> list[Layout]:
        return [self.known[slot]] if slot in self.known else self.choices(shape)

    def _read(self, tops: Sequence[tuple[NodeSlot, Tensor]], cut: dict[NodeSlot, list[Layout]]) -> Iterator[Reading]:
        """All readings of one set of tensors."""
        starts = self._cotangents(tops, cut)
        slots, grads = [slot for slot, _, _ in starts], [g for _, g, _ in starts]
        for layouts in islice(product(*[choices for _, _, choices in starts]), _TRIES):
            places = list(zip(slots, layouts, [tuple(g.shape) for g in grads], strict=True))
            usual = [slot in self.known or self._promised(shape, layout) for slot, layout, shape in places]
            returned = [slot in dict(tops) for slot in slots]
            promised = [
                r and (u or self._is_state(cut[slot], shape))
                for (slot, _, shape), u, r in zip(places, usual, returned, strict=True)
            ]
            roots = Roots(slots, layouts, self.batch, grads)
            yield Reading(roots, promised, all(usual), all(returned))

    def _is_state(self, choices: Sequence[Layout], shape: Shape) -> bool:
        """May this be a recurrent state, (layers, B, features)?"""
        return len(choices) == 1 and len(shape) == 3 and shape[1] == self.batch

    def _cotangents(self, tops: Sequence[tuple[NodeSlot, Tensor]], cut: dict[NodeSlot, list[Layout]]) -> list[_Start]:
        """The cotangents of these tensors: those given, and what comes from results above."""
        found = {slot: g for slot, g in tops if slot in cut}
        above = [(slot, g) for slot, g in tops if slot not in cut]
        if above:
            edges, cotangents = [GradientEdge(*slot) for slot, _ in above], [g for _, g in above]
            targets = [GradientEdge(*slot) for slot in cut]
            extra = torch.autograd.grad(edges, targets, cotangents, retain_graph=True, allow_unused=True)
            for slot, g in zip(cut, extra, strict=True):
                if g is not None:
                    found[slot] = found[slot] + g if slot in found else g
        return [(slot, found[slot], cut[slot]) for slot in cut if slot in found]

    def _cut(
        self, tape: Tape, tops: Sequence[tuple[NodeSlot, Tensor]], unfit: set[NodeSlot]
    ) -> dict[NodeSlot, list[Layout]]:
        """The nearest tensors that may hold a batch, none of them below another; ``unfit`` ones are passed."""
        passed = set(unfit)
        while True:
            found = self._nearest(tape, [slot for slot, _ in tops], passed)
            nodes = {slot[0] for slot in found}
            upper = {slot for slot in found if _leads_to(tape, slot[0], nodes - {slot[0]})}
            if not upper:
                return found
            passed |= upper  # what it leads to would be counted twice

    def _nearest(self, tape: Tape, tops: Sequence[NodeSlot], passed: set[NodeSlot]) -> dict[NodeSlot, list[Layout]]:
        found: dict[NodeSlot, list[Layout]] = {}
        stack = [slot for top in tops if (slot := tape.graph.slot(top)) is not None and slot[0] in tape.edges]
        seen = set(stack)
        while stack:
            slot = stack.pop()
            at = tape.graph.at(slot)
            places = self._places(at, tape.shape(slot))
            if places and at not in passed:
                found[at] = places
                continue
            for below in tape.edges[slot[0]]:
                if below is None or below in seen:
                    continue
                if weights_only(tape, below[0]):
                    raise self._without_samples(tape, at)
                seen.add(below)
                stack.append(below)
        return found

    def _without_samples(self, tape: Tape, at: NodeSlot) -> UnknownBatch:
        slot = tape.graph.slot(at)
        assert slot is not None
        return UnknownBatch(
            f"parameters are used without any sample ({type(at[0]).__name__}), as in a penalty on weights, or there "
            f"is no batch of {self.batch} samples in a tensor of shape {tape.shape(slot)}: whose gradient that is "
            f"cannot be known. Return one loss per sample, and add such terms outside"
        )

    def settle(self, tape: Tape) -> None:
        """Find out what was left until now: from data run again, or else from inputs that nodes have saved."""
        if self.data is not None:
            found = {
                at: v
                for at, v in self.data.found(self.choices, self.known).items()
                if tape.graph.numbers.get(at[0]) in tape.edges
            }
            self.tables, self.data = self.data.tables(), None
            ops = dict.fromkeys(verdict.op for verdict in found.values() if verdict.interact and verdict.op)
            if ops:
                raise _interaction(ops)
            self.pooled = {slot: found.pop(slot) for slot in [slot for slot, v in found.items() if v.pooled]}
            self.known.update({slot: v.layout for slot, v in found.items() if isinstance(v.layout, Block)})
            self.moved.update({slot: v for slot, v in found.items() if isinstance(v.layout, Labels)})
            if not self.known:
                self.known.update(self._saved(tape))

    def evidence(self) -> dict[NodeSlot, Layout]:
        """All that is known inside."""
        return {**self.known, **{slot: v.layout for slot, v in self.moved.items() if v.layout is not None}}

    def pooled_below(self, reading: Reading, tape: Tape) -> dict[NodeSlot, Layout]:
        """Data in which samples met, and that the samples of this reading may use; it is not known how."""
        nodes = {tape.graph.numbers.get(node) for node, _ in self.pooled}
        starts = [slot[0] for at in reading.roots.slots if (slot := tape.graph.slot(at)) and slot[0] in tape.edges]
        used = bool(nodes) and any(not nodes.isdisjoint(tape.below(start)) for start in starts)
        return dict.fromkeys(self.pooled, Labels(self.batch, torch.zeros(1, dtype=torch.long))) if used else {}

    def _saved(self, tape: Tape) -> Iterator[tuple[NodeSlot, Layout]]:
        """Results of ops that were given an input of the call, though no function of weights was seen to be."""
        for number in tape.order:
            node = tape.node(number)
            name, rows = tape.op(number).saved_data or ("", 0)
            x = tensor(node, name) if name and not in_checkpoint(node) else None
            layout = None if x is None else self.of_input(x)
            if x is not None and layout is not None:
                kept = [d if d < (rows or x.ndim) else None for d in range(x.ndim)]
                found = carry(layout, tuple(x.shape), tape.shapes(number)[0], kept)
                if found is not None:
                    yield (node, 0), found

    def verify(self, plan: CapturePlan, reading: Reading, follow: bool) -> None:
        """Refuse a reading that contradicts what is known inside, or that lacks evidence and needs it.

        Evidence is needed for what was not promised; with ``follow``, for everything, if the data can give any.
        """
        agreed = self.compare(plan, mixed=False)
        ops = dict.fromkeys(str(v.op) for slot, v in self.pooled.items() if _is_used(plan, slot, v.layout))
        if ops:
            raise _interaction(ops)
        for at, promised in zip(reading.roots.slots, reading.promised, strict=True):
            needed = not promised or (follow and bool(self.known))
            slot = plan.tape.graph.slot(at)
            live = slot is not None and slot[0] in plan.tape.edges and 0 not in plan.tape.shape(slot)
            if needed and live and slot is not None and agreed.isdisjoint(plan.tape.below(slot[0])):
                raise Disagreement(unproven=True)

    def compare(self, plan: CapturePlan, mixed: bool = True) -> set[int]:
        """The nodes where a reading agrees with what is known; it may say that samples have ``mixed`` there."""
        agreed: set[int] = set()
        for at, layout in self.evidence().items():
            slot = plan.tape.graph.slot(at)
            state = None if slot is None else plan.map.cotangents.get(slot)
            if slot is None or state is None:
                continue
            differs = isinstance(state, Layout) and join(state, layout, plan.tape.shape(slot)) is None
            shared = state is Flow.SHARED and not only_counts(at[0])  # positions may be as many as samples
            if differs or ((state is Flow.MIXED or shared) and not mixed):
                raise Disagreement(self.moved[at].op if at in self.moved else None)
            agreed.update([slot[0]] if isinstance(state, Layout) else [])
        return agreed


def _is_used(plan: CapturePlan, at: NodeSlot, layout: Layout | None) -> bool:
    """Does a sample use what was made of several ones, or other samples' rows?"""
    slot = plan.tape.graph.slot(at)
    state = None if slot is None else plan.map.cotangents.get(slot)
    return state in (Flow.MIXED, Flow.SHARED) or (layout is None and state is not None)


def _interaction(ops: Iterable[str]) -> InteractionError:
    error = InteractionError()
    error.ops = tuple(ops)
    return error


def _leads_to(tape: Tape, node: Node, goals: set[Node]) -> bool:
    number, numbers = tape.graph.numbers[node], {tape.graph.numbers[goal] for goal in goals}
    return not numbers.isdisjoint(tape.below(number)[1:])


def _shares_storage(a: Tensor, b: Tensor) -> bool:
    try:
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors and those of transforms have none
        return False


def along(shape: Sequence[int], dim: int, batch: int) -> Block:
    """The samples are dim ``dim``, or its outer part where it is larger than the batch."""
    step = strides(tuple(shape))[dim]
    return Block(batch, step * max(shape[dim] // batch, 1)) if batch else Block(0, step)


def of_packed(batch_sizes: Tensor, order: Tensor | None, data: Tensor, batch: int) -> Layout:
    """The samples of a packed sequence: at every step the first so many of ``order``."""
    order = torch.arange(batch, device="cpu") if order is None else order.cpu()
    index = torch.cat([order[:n] for n in batch_sizes.tolist()])
    return Labels(batch, index.reshape([-1, *[1] * (data.ndim - 1)]))
