"""The autograd graph below the losses, read once. From here on, its nodes are numbers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from weakref import ref

from torch import Tensor
from torch.autograd.graph import Node

from ..._errors import UnsupportedError
from ...distributed.tensor_parallel import changes_placements
from ...traverse import leading_to, ordered
from ..layout import Shape
from ..ops.table import Op, lookup
from .compiled import is_compiled
from .nodes import NodeSlot, is_leaf, is_opaque, leaf_of, op_name
from .reentrant import REENTRANT
from .regions import Regions
from .saved import function_of, is_custom, metadata

Slot = tuple[int, int]  # the number of a node, and which of its cotangents: the gradient of the forward op's output


@dataclass(slots=True)
class Graph:
    """Nodes, numbered in the order in which they are reached, and their edges; equal for graphs built alike."""

    nodes: list[Node]
    edges: list[tuple[Slot | None, ...]]  # per backward output of every node, where it goes
    leaves: dict[int, Tensor]
    numbers: dict[Node, int]
    starts: range  # the nodes that it was read from
    form: Hashable  # equal for graphs built alike; None if a part of this one cannot be compared
    shapes: dict[int, tuple[Shape, ...]] = field(default_factory=dict)  # of the cotangents of nodes, as far as known

    def slot(self, at: NodeSlot) -> Slot | None:
        """The number of a place in PyTorch's graph; None if it is not in this one."""
        number = self.numbers.get(at[0])
        return None if number is None else (number, at[1])

    def at(self, slot: Slot) -> NodeSlot:
        """The place in PyTorch's graph that a slot stands for."""
        return self.nodes[slot[0]], slot[1]

    def below(self, number: int) -> list[int]:
        """The nodes that a node's outputs go to."""
        return [slot[0] for slot in self.edges[number] if slot is not None]

    def leaves_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of the leaves that stand for these tensors."""
        wanted = {id(t) for t in tensors}
        return {number for number, leaf in self.leaves.items() if id(leaf) in wanted}

    def ending_at(self, numbers: Collection[int]) -> Graph:
        """This graph without the edges of some nodes."""
        return replace(self, edges=[() if n in numbers else outputs for n, outputs in enumerate(self.edges)])

    def tape(self, tensors: Iterable[Tensor]) -> Tape:
        """What leads to these tensors."""
        leaves = self.leaves_of(tensors)
        needed = leaves | leading_to(self.starts, leaves, self.below)
        order = ordered([n for n in self.starts if n in needed], lambda n: [c for c in self.below(n) if c in needed])
        edges = {
            number: tuple([slot if slot is not None and slot[0] in needed else None for slot in self.edges[number]])
            for number in order
        }
        fed = {number for number in order if None in edges[number]}
        others = [number for number in self.leaves if number not in leaves]
        return Tape(self, order, edges, sorted(leaves), others, fed)


@dataclass(slots=True)
class Tape:
    """The part of a graph that leads to requested leaves."""

    graph: Graph
    order: list[int]  # every node after all that feed it cotangents
    edges: dict[int, tuple[Slot | None, ...]]  # per backward output; None where nothing requested lies beyond
    leaves: Sequence[int]  # of requested parameters
    others: Sequence[int] = ()  # leaves that nobody asked for
    fed: set[int] = field(default_factory=set)  # nodes with an operand that leads to no parameter: data, or a number
    data: Collection[int] = ()  # leaves among those requested that are no weights
    maybe_data: Collection[int] = ()  # leaves that may be weights, or data that carry a gradient
    weights: dict[int, bool] = field(default_factory=dict)  # whether all below a node is computed from weights alone

    def node(self, number: int) -> Node:
        """The node of this number."""
        return self.graph.nodes[number]

    def op(self, number: int) -> Op:
        """What is known of a node's op."""
        return lookup(self.graph.nodes[number])

    def name(self, number: int) -> str:
        """The name of a node's op."""
        return op_name(self.graph.nodes[number])

    def is_leaf(self, number: int) -> bool:
        """Does this node stand for a leaf tensor?"""
        return number in self.graph.leaves

    def shapes(self, number: int) -> tuple[Shape, ...]:
        """The shapes of a node's cotangents."""
        known = self.graph.shapes.get(number)
        if known is None:
            known = self.graph.shapes[number] = _shapes_of(self.graph.nodes[number])
        return known

    def shape(self, slot: Slot) -> Shape:
        """The shape of one cotangent."""
        return self.shapes(slot[0])[slot[1]]

    def below(self, number: int) -> list[int]:
        """A node and all that it leads to."""
        return ordered([number], lambda n: [slot[0] for slot in self.edges[n] if slot is not None])


def _shapes_of(node: Node) -> tuple[Shape, ...]:
    metas = metadata(node)
    if any(m.is_nested_tensor for m in metas):
        raise UnsupportedError(
            f"the result of {op_name(node)} is a nested tensor, in which rows have no place of their own: give the "
            f"model a padded tensor (torch.nested.to_padded_tensor), or all rows as one tensor of shape (N, ...) "
            f"(torch.cat(x.unbind()), or x.values() if it is jagged) and add up losses by sample with index_add"
        )
    return tuple([tuple(m.shape) for m in metas])


def read(starts: Iterable[Node], regions: Regions | None = None) -> Graph:
    """Read the graph below these nodes, and what its reentrant checkpoints hide; they are refused without ``regions``.

    Its form is the kinds of nodes, their edges, and the shapes of their cotangents where these do not
    follow from others.
    """
    numbers = {node: number for number, node in enumerate(dict.fromkeys(starts))}
    graph = Graph(list(numbers), [], {}, numbers, range(len(numbers)), None)
    nodes, inside = graph.nodes, regions.owners if regions is not None else ()
    for node in nodes:  # which grows
        outputs: list[Slot | None] = []
        for child, nr in regions.below(node) if regions is not None and node in inside else node.next_functions:
            below = numbers.get(child)  # type: ignore[arg-type]
            if below is None:
                if regions is not None and (type(child) is REENTRANT or child in regions.entries):
                    child, nr = regions.resolve(child, nr)
                if child is None:
                    outputs.append(None)
                    continue
                below = numbers.setdefault(child, len(nodes))
                if below == len(nodes):
                    nodes.append(child)
            outputs.append((below, nr))
        graph.edges.append(tuple(outputs))
    graph.form = _form(graph)
    return graph


def _form(graph: Graph) -> Hashable:
    """Find the leaves, and what graphs built alike have in common; None if that cannot be said."""
    form: list[Hashable] = []
    comparable = True
    for number, (node, edges) in enumerate(zip(graph.nodes, graph.edges, strict=True)):
        kind = type(node)
        reading = _READINGS.get(kind) or _reading(node, kind)
        form += (kind if reading is not _COMPILED else ref(function_of(node)), edges)  # type: ignore[arg-type]
        if reading is _LEAF:
            graph.leaves[number] = leaf_of(node)
        elif reading is _OPAQUE or reading is _PLACES:
            comparable = False
        elif comparable and (reading is not _FOLLOWS or None in edges):
            metas = metadata(node)
            comparable = not any(m.is_nested_tensor for m in metas)  # which have no shape; planning says so
            if comparable:
                graph.shapes[number] = tuple([tuple(m.shape) for m in metas])
                form.append(graph.shapes[number])
    return tuple(form) if comparable else None


# Of a graph with DTensors no plan is remembered: processes gather together what planning reads, or none of them does.
_OP, _LEAF, _OPAQUE, _COMPILED, _FOLLOWS, _PLACES = "op", "leaf", "opaque", "compiled", "follows", "places"
_READINGS: dict[type, str] = {}  # what there is to know of nodes of a kind


def _reading(node: Node, kind: type) -> str:
    if kind.__name__ == "CppFunction" or is_opaque(node):  # and not kept, as it may be a class of the user's
        if is_custom(node) and hasattr(node, "run_function"):  # as those of other libraries call it, too
            raise UnsupportedError(
                "the graph holds a reentrant checkpoint (use_reentrant=True) at a place where the ops inside it cannot "
                "be seen: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        return _COMPILED if is_compiled(node) else _OPAQUE  # of which the reader says more (graph/compiled)
    if changes_placements(node):
        return _READINGS.setdefault(kind, _PLACES)
    reading = _LEAF if is_leaf(node) else _FOLLOWS if lookup(node).shape_follows else _OP
    return _READINGS.setdefault(kind, reading)
