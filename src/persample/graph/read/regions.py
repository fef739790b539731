"""The graph with its reentrant checkpoints opened: to be read as one, and run piece by piece.

An edge to a checkpoint's node leads on to the region that it stands for, and the region's own inputs lead back to what
the checkpoint was given. The engine knows nothing of that: it runs the outer graph, and where it comes to the node of a
checkpoint, the region is run in its place. So cotangents are summed, and regions let go, as in an ordinary backward.

A function may use a computed tensor around it that it was not given. The engine does not know of such an edge either,
and would come to the tensor before all of its cotangent is there: the graph is read up to that tensor, and requests for
anything beyond it are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ..._errors import UnsupportedError
from ...traverse import leading_to, ordered
from .nodes import NodeSlot, children, is_leaf, leaf_of, op_name
from .reentrant import Outputs, Region, is_reentrant, open_region, run_instead, same_again
from .saved import born, metadata

Starts = Sequence[tuple[NodeSlot, Tensor]]  # where a backward starts, and the cotangents there


class Regions:
    """The regions of the graph below ``roots``, each opened when it is first reached."""

    def __init__(self, roots: Sequence[Node]) -> None:
        self.roots = roots
        self.outer: set[Node] = set()  # the nodes of the graph itself, read when the first region is opened
        self.opened: dict[Node, Region] = {}
        self.owners: dict[Node, Region] = {}  # nodes inside -> the region they lie in
        self.entries: dict[Node, tuple[Node, int]] = {}  # leaves inside -> the checkpoint, and which of its edges
        self.taken: list[NodeSlot] = []  # tensors that regions use without being given them

    def resolve(self, node: Node | None, nr: int) -> tuple[Node | None, int]:
        """Where an edge leads to, past the borders of regions."""
        while node is not None:
            slot: NodeSlot | None
            if is_reentrant(node):
                slot = self._open(node).outputs[nr]
            elif node in self.entries:
                slot = self._edge(*self.entries[node])
            else:
                break
            node, nr = slot or (None, 0)
        return node, nr

    def below(self, node: Node) -> tuple[tuple[Node | None, int], ...]:
        """Where a node's edges lead to."""
        edges = node.next_functions
        if node in self.owners:
            edges = tuple([self._edge(node, k) or (None, 0) for k in range(len(edges))])
        return tuple([self.resolve(child, nr) for child, nr in edges])

    def children(self, node: Node) -> Iterator[Node]:
        """The nodes that a node's edges lead to."""
        return (child for child, _ in self.below(node) if child is not None)

    def _edge(self, node: Node, k: int) -> NodeSlot | None:
        """Where an edge leads to in the piece that its node lies in; nowhere, if it leads out of a region."""
        child, nr = node.next_functions[k]
        if child is None:
            return None
        region = self.owners.get(node)
        if region is None or child not in region.outside:
            return child, nr
        self.taken += [] if (child, nr) in self.taken else [(child, nr)]
        return None

    def _open(self, node: Node) -> Region:
        region = self.opened.get(node)
        if region is None:
            self.outer = self.outer or set(ordered(self.roots, children))
            owner = self.owners.get(node)
            region = self.opened[node] = open_region(node, self.outer if owner is None else owner.own)
            for k, entry in enumerate(region.inputs):
                if entry is not None:
                    self.entries[entry[0]] = node, k
            self._enter(region)
        return region

    def _enter(self, region: Region) -> None:
        """Find the nodes of a region, below its outputs: those that were not there before."""
        ends = {slot[0] for slot in region.outputs if slot is not None}

        def is_inside(node: Node) -> bool:
            made_before = born(node) < region.start or node in self.outer or node in self.owners
            return not is_leaf(node) and not made_before

        for node in ordered(ends, lambda node: children(node) if is_inside(node) else ()):
            (region.leaves if is_leaf(node) else region.own if is_inside(node) else region.outside).add(node)
        self.owners.update(dict.fromkeys(region.own, region))
        if not ends.isdisjoint(region.outside):
            raise UnsupportedError(
                "the function of a reentrant checkpoint returned a tensor that it was not given, and PyTorch takes "
                "it for its result everywhere from then on: pass it as an argument, or return a clone"
            )

    def refuse_taken(self, wanted: Iterable[Tensor] | None = None) -> None:
        """Refuse tensors that a region uses without being given them, if they lead to these leaves, or to any."""
        ids = None if wanted is None else {id(t) for t in wanted}
        for node, nr in self.taken:  # which grows
            inner, _ = self.resolve(node, nr)
            below = ordered([] if inner is None else [inner], self.children)
            if ids is None or any(is_leaf(one) and id(leaf_of(one)) in ids for one in below):
                raise UnsupportedError(
                    f"the function of a reentrant checkpoint uses a result of {op_name(inner or node)} of shape "
                    f"{tuple(metadata(node)[nr].shape)} without being given it: pass it as an argument, by itself and "
                    f"not in a list, or use checkpoint(..., use_reentrant=False)"
                )

    def backward(self, starts: Starts, slots: Sequence[NodeSlot], *, retain_graph: bool) -> tuple[Tensor | None, ...]:
        """The gradients at ``slots``, inside of regions or outside."""
        run = _Run(self, starts, slots, retain_graph)
        run.piece(None)
        return tuple([run.gradients.get(slot) for slot in slots])


class _Run:
    """One backward, over all pieces: the outer graph (None), and the regions that lead to something asked for."""

    def __init__(self, regions: Regions, starts: Starts, slots: Sequence[NodeSlot], retain_graph: bool) -> None:
        self.regions, self.starts, self.retain_graph = regions, starts, retain_graph
        self.slots = list(dict.fromkeys(slots))
        self.gradients: dict[NodeSlot, Tensor] = {}  # at the slots asked for
        roots, goals = (
            {node for slot in many if (node := regions.resolve(*slot)[0]) is not None}
            for many in ([s for s, _ in starts], slots)
        )
        self.needed: set[Node | None] = {*leading_to(roots, goals, regions.children), *goals}

    def piece(self, region: Region | None, starts: Starts = ()) -> Outputs:
        """Run the outer graph from its starts, or a region; the gradients of a region's inputs come back."""
        starts = self.starts if region is None else starts
        asked, inputs = self._asked(region), self._inputs(region)
        slots = [*asked, *[entry for entry in inputs if entry is not None]]
        checkpoints = [node for node in self._nodes(region) if is_reentrant(node)]
        live = [node for node in checkpoints if self._is_needed(node)]
        passed = leading_to([node for (node, _), _ in starts], {node for node, _ in slots} | set(live), children)
        # Where the engine is to go no further, it hands over the cotangents, and the region is run after.
        last = {node: self._cotangents(node) for node in live if node not in passed}
        # An input that a function does not use leads on for the engine alone: it runs nodes that are read afterwards.
        going_on = any(node in passed for node, _ in asked)
        grads = self._run_piece(starts, slots, checkpoints, last, retain_graph=self.retain_graph or going_on)
        for slot in asked:
            self._add(slot, grads[slot])
        return [None if entry is None else grads[entry] for entry in inputs]

    def _run_piece(
        self,
        starts: Starts,
        slots: Sequence[NodeSlot],
        checkpoints: Sequence[Node],
        last: Mapping[Node, Sequence[NodeSlot]],
        *,
        retain_graph: bool,
    ) -> dict[NodeSlot, Tensor | None]:
        """The gradients at ``slots``; regions run in place of their checkpoints, those in ``last`` at the end."""
        with ExitStack() as stack:
            for node in checkpoints:
                stack.enter_context(run_instead(node, partial(self._through, node)))
            grads = _grad(starts, [*slots, *chain(*last.values())], retain_graph=retain_graph)
            for node, cotangents in last.items():
                self._through(node, [grads.pop(slot) for slot in cotangents])
        return grads

    def _through(self, node: Node, grads: Outputs) -> Outputs:
        """A region in the place of its checkpoint's node."""
        nothing: Outputs = [None] * len(node.next_functions)
        if not self._is_needed(node):
            return nothing
        region = self.regions.opened[node]
        starts = [(s, g) for s, g in zip(region.outputs, grads, strict=True) if s is not None and g is not None]
        with same_again():
            return self.piece(region, starts) if starts else nothing

    def _is_needed(self, node: Node) -> bool:
        """Is something asked for in a region, or below it? One that was not opened leads nowhere."""
        region = self.regions.opened.get(node)
        slots = () if region is None else [self.regions.resolve(*slot) for slot in region.outputs if slot is not None]
        return any(below in self.needed for below, _ in slots)

    def _nodes(self, region: Region | None) -> set[Node]:
        return self.regions.outer if region is None else region.own

    def _cotangents(self, node: Node) -> list[NodeSlot]:
        return [(node, nr) for nr in range(len(self.regions.opened[node].outputs))]

    def _asked(self, region: Region | None) -> list[NodeSlot]:
        """What is asked for in this piece; a leaf may be in several, which are summed."""
        if region is None:
            return [slot for slot in self.slots if slot[0] not in self.regions.owners]
        return [slot for slot in self.slots if slot[0] in region.own or slot[0] in region.leaves]

    def _inputs(self, region: Region | None) -> list[NodeSlot | None]:
        """The leaves inside, of which the gradients are needed outside."""
        if region is None:
            return []
        used = [entry if entry is not None and entry[0] in region.leaves else None for entry in region.inputs]
        return [None if e is None or self.regions.resolve(*e)[0] not in self.needed else e for e in used]

    def _add(self, slot: NodeSlot, g: Tensor | None) -> None:
        if g is not None:
            before = self.gradients.get(slot)
            self.gradients[slot] = g if before is None else before + g


def _grad(starts: Starts, slots: Iterable[NodeSlot], *, retain_graph: bool) -> dict[NodeSlot, Tensor | None]:
    asked = list(dict.fromkeys(slots))
    if not asked or not starts:
        return dict.fromkeys(asked)
    outputs, inputs = ([GradientEdge(node, nr) for node, nr in many] for many in ([s for s, _ in starts], asked))
    cotangents = [g for _, g in starts]
    gradients = torch.autograd.grad(outputs, inputs, cotangents, retain_graph=retain_graph, allow_unused=True)
    return dict(zip(asked, gradients, strict=True))
