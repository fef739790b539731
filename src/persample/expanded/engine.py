"""All that is asked of the graph engine about a recorded call: no other file here looks into a tape or a plan.

A tensor is named by its slot: the node that has made it, and which of that node's results it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor, nn

from ..graph.execute.plan import CapturePlan, plan
from ..graph.layout import Layout, Shape
from ..graph.locate.constants import only_counts
from ..graph.locate.follow import assign
from ..graph.locate.interaction import interactions
from ..graph.read.nodes import NodeSlot, children
from ..graph.read.roots import Roots, slot_of
from ..graph.read.saved import in_checkpoint, metadata, tensor
from ..graph.read.site import Flow, weights_only
from ..graph.read.tape import Graph, Tape, read
from ..traverse import leading_to


def read_outputs(outputs: Sequence[Tensor]) -> Graph:
    """The graph below a call's outputs."""
    return read([slot_of(y)[0] for y in outputs])


def other_leaves(graph: Graph, known: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that want a gradient, and are none of those that are known."""
    ids = {id(leaf) for leaf in known}
    return [leaf for leaf in graph.leaves.values() if id(leaf) not in ids]


def is_computed_from(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """Does the graph lead from one of these results to one of these leaves?"""
    return bool(leading_to([slot_of(y)[0] for y in results], {slot_of(x)[0] for x in leaves}, children))


def shape_of(slot: NodeSlot) -> Shape:
    """The shape of a tensor in any graph."""
    node, nr = slot
    return tuple(metadata(node)[nr].shape)


class CallGraph:
    """The graph of one call, from its outputs to the leaves that stand for weights and inputs."""

    def __init__(
        self, outputs: Sequence[Tensor], weights: Sequence[Tensor], inputs: Sequence[Tensor], graph: Graph | None = None
    ) -> None:
        self._graph = graph or read_outputs(outputs)
        self._leaves, self._data = [*weights, *inputs], [x for x in inputs if not isinstance(x, nn.Parameter)]
        self._tape = self._graph.tape(self._leaves)
        self._tape.data = self._graph.leaves_of(self._data)

    def holds(self, slot: NodeSlot) -> bool:
        """Does this tensor lie between outputs and leaves?"""
        return self._graph.numbers.get(slot[0]) in self._tape.edges

    def shape(self, slot: NodeSlot) -> Shape:
        """The shape of a tensor."""
        return shape_of(slot)

    def below(self, slot: NodeSlot) -> list[NodeSlot]:
        """The tensors that this one was computed from."""
        edges = self._tape.edges[self._graph.numbers[slot[0]]]
        return [self._graph.at(below) for below in edges if below is not None]

    def leads_to(self, slot: NodeSlot, others: Collection[NodeSlot]) -> bool:
        """Was it computed from any of the others?"""
        _, *below = self._tape.below(self._graph.numbers[slot[0]])
        return not {self._graph.numbers.get(node) for node, _ in others}.isdisjoint(below)

    def is_weight(self, slot: NodeSlot) -> bool:
        """Was it computed from weights and numbers alone?"""
        return weights_only(self._tape, self._graph.numbers[slot[0]])

    def saved_data(self) -> Iterator[tuple[NodeSlot, Tensor, list[int | None]]]:
        """Results of ops that have saved their data, these data, and where in the result each of their dims is."""
        for number in self._tape.order:
            node, (name, rows) = self._tape.node(number), self._tape.op(number).saved_data or ("", 0)
            x = tensor(node, name) if name and not in_checkpoint(node) else None
            if x is not None:
                yield (node, 0), x, [d if d < (rows or x.ndim) else None for d in range(x.ndim)]

    def plan(self, roots: Roots) -> CapturePlan:
        """What a backward from ``roots`` to all leaves would do; nothing is run."""
        return plan(roots, self._leaves, data=self._data)

    def interact_without(self, tables: Sequence[NodeSlot], made: CapturePlan, roots: Roots) -> bool:
        """Do samples meet in any other place than in tables, to which no input has contributed?

        The engine sees that a constant as long as the batch went into what all samples share, but not what it is: the
        other samples' data, or sines of positions.
        """
        tape = made.tape
        numbers = {tape.graph.numbers.get(node) for node, _ in tables}
        tops = {n for n in numbers if n is not None and n in tape.edges and not weights_only(tape, n)}
        if not tops or _used_with_data(tape, tops):
            return True
        cut = tape.graph.ending_at(tops).tape(self._leaves)
        cut.fed &= tape.fed
        cut.data = tape.data
        return bool(interactions(cut, assign(cut, roots), thoroughly=True))


def _used_with_data(tape: Tape, tops: set[int]) -> bool:
    """Is any of them used by an op that is given a constant that may be data, so that it must be looked at as it is?"""
    inside = {node for top in tops for node in tape.below(top)}
    return any(
        node in tape.fed and any(slot is not None and slot[0] in tops for slot in tape.edges[node])
        for node in tape.order
        if node not in inside
    )


def located(made: CapturePlan, slot: NodeSlot) -> Layout | Flow | None:
    """Where a plan has the samples of a tensor; None if it does not come to it."""
    numbered = made.tape.graph.slot(slot)
    return None if numbered is None else made.samples.cotangents.get(numbered)


def counts_positions(slot: NodeSlot) -> bool:
    """Was it computed with integers that are positions, and no data, though there may be as many as samples?"""
    return bool(only_counts(slot[0]))


def rests_on(made: CapturePlan, slot: NodeSlot, evidence: Collection[NodeSlot]) -> bool:
    """Was a tensor computed from any of these, if a backward from it carries anything at all?"""
    numbered = made.tape.graph.slot(slot)
    if numbered is None or numbered[0] not in made.tape.edges or 0 in made.tape.shape(numbered):
        return True
    return not {made.tape.graph.numbers.get(node) for node, _ in evidence}.isdisjoint(made.tape.below(numbered[0]))
