"""All that is asked of the graph engine about a recorded call: no other file here looks into a tape or a plan.

A tensor is named by its slot: the node that has made it, and which of that node's results it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor, nn
from torch.autograd.graph import Node

from ..graph.assign import assign
from ..graph.interaction import interactions
from ..graph.layout import Layout, Shape
from ..graph.plan import Plan, plan
from ..graph.roots import Roots, slot_of
from ..graph.rows import only_counts
from ..graph.saved import in_checkpoint, metadata, tensor
from ..graph.site import Flow, weights_only
from ..graph.tape import Slot, Tape, edges_of, leading_to, leaf_of, op_name, walk

# Nodes that save their data: under which name, and how many of its first dims the result keeps (0: all).
_SAVED_DATA = {"Addmm": ("mat1", 1), "Mm": ("self", 1), "Convolution": ("input", 1), "Embedding": ("indices", 0)}


def read(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Tape:
    """The graph from a call's outputs to these leaves."""
    return walk([slot_of(y)[0] for y in outputs], leaves)


def other_leaves(tape: Tape) -> list[Tensor]:
    """The leaves that want a gradient, and are none of those the graph was read for."""
    return [leaf_of(node) for node in tape.others]


def is_computed_from(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """Does the graph lead from one of these results to one of these leaves?"""
    return bool(leading_to([slot_of(y)[0] for y in results], {slot_of(x)[0] for x in leaves}))


def shape_of(slot: Slot) -> Shape:
    """The shape of a tensor in any graph."""
    node, nr = slot
    return tuple(metadata(node)[nr].shape)


class Graph:
    """The graph of one call, from its outputs to the leaves that stand for weights and inputs."""

    def __init__(
        self, outputs: Sequence[Tensor], weights: Sequence[Tensor], inputs: Sequence[Tensor], tape: Tape | None = None
    ) -> None:
        self._leaves = [*weights, *inputs]
        self._tape = tape or read(outputs, self._leaves)
        self._tape.data = {slot_of(x)[0] for x in inputs if not isinstance(x, nn.Parameter)}

    def holds(self, slot: Slot) -> bool:
        """Does this tensor lie between outputs and leaves?"""
        return slot[0] in self._tape.edges

    def shape(self, slot: Slot) -> Shape:
        """The shape of a tensor."""
        return self._tape.shape(slot)

    def below(self, slot: Slot) -> list[Slot]:
        """The tensors that this one was computed from."""
        return [below for below in self._tape.edges[slot[0]] if below is not None]

    def leads_to(self, slot: Slot, others: Collection[Slot]) -> bool:
        """Was it computed from any of the others?"""
        nodes = {node for node, _ in others} - {slot[0]}
        return any(self._tape.reaches(below[0], nodes.__contains__) for below in self.below(slot))

    def is_weight(self, slot: Slot) -> bool:
        """Was it computed from weights and numbers alone?"""
        return weights_only(self._tape, slot[0])

    def saved_data(self) -> Iterator[tuple[Slot, Tensor, list[int | None]]]:
        """Results of ops that have saved their data, these data, and where in the result each of their dims is."""
        for node in self._tape.order:
            name, rows = _SAVED_DATA.get(op_name(node), ("", 0))
            x = tensor(node, name) if name and not in_checkpoint(node) else None
            if x is not None:
                yield (node, 0), x, [d if d < (rows or x.ndim) else None for d in range(x.ndim)]

    def plan(self, roots: Roots) -> Plan:
        """What a backward from ``roots`` to all leaves would do; nothing is run."""
        return plan(roots, self._leaves, data=self._tape.data)

    def interact_without(self, tables: Sequence[Slot], found: Plan, roots: Roots) -> bool:
        """Do samples meet in any other place than in tables, to which no input has contributed?

        The engine sees that a constant as long as the batch went into what all samples share, but not what it is: the
        other samples' data, or sines of positions.
        """
        tape = found.tape
        tops = {node for node, _ in tables if node in tape.edges and not weights_only(tape, node)}
        if not tops or _used_with_data(tape, tops):
            return True
        cut = walk(roots.nodes, self._leaves, lambda node: () if node in tops else edges_of(node))
        cut.fed &= tape.fed
        cut.data = tape.data
        return bool(interactions(cut, assign(cut, roots), thoroughly=True))


def _used_with_data(tape: Tape, tops: set[Node]) -> bool:
    """Is any of them used by an op that is given a constant that may be data, so that it must be looked at as it is?"""
    inside = set().union(*[tape.below(node) for node in tops])
    return any(
        node in tape.fed and any(slot is not None and slot[0] in tops for slot in tape.edges[node])
        for node in tape.order
        if node not in inside
    )


def located(found: Plan, slot: Slot) -> Layout | Flow | None:
    """Where a plan has the samples of a tensor; None if it does not come to it."""
    return found.map.cotangents.get(slot)


def counts_positions(slot: Slot) -> bool:
    """Was it computed with integers that are positions, and no data, though there may be as many as samples?"""
    return only_counts(slot[0])


def rests_on(found: Plan, slot: Slot, evidence: Collection[Slot]) -> bool:
    """Was a tensor computed from any of these, if a backward from it carries anything at all?"""
    if slot[0] not in found.tape.edges or 0 in found.tape.shape(slot):
        return True
    nodes = {node for node, _ in evidence}
    return found.tape.reaches(slot[0], nodes.__contains__)
