"""The graph with its reentrant checkpoints opened: to be read as one, and run piece by piece.

An edge to a checkpoint's node leads on to the region that it stands for, and the region's own inputs lead back to what
the checkpoint was given. The engine knows nothing of that: it runs the outer graph, and where it comes to a checkpoint's
node, the region is run in its place. So cotangents are summed, and regions let go, as in an ordinary backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .._errors import UnsupportedError
from .reentrant import Outputs, Region, is_reentrant, open_region, run_instead
from .tape import Slot, leading_to, op_name


class Regions:
    """The regions of the graph below ``roots``, opened as they are come upon."""

    def __init__(self, roots: Sequence[Node]) -> None:
        self.roots = roots
        self.opened: dict[Node, Region] = {}
        self.entries: dict[Node, Slot | None] = {}  # leaves inside -> where the graph goes on outside

    def resolve(self, node: Node | None, nr: int) -> tuple[Node | None, int]:
        """Where an edge leads to, past the borders of regions."""
        while node is not None:
            slot: Slot | None
            if is_reentrant(node):
                slot = self._open(node).outputs[nr]
            elif node in self.entries:
                slot = self.entries[node]
            else:
                break
            node, nr = slot or (None, 0)
        return node, nr

    def below(self, node: Node) -> tuple[tuple[Node | None, int], ...]:
        """Where a node's edges lead to."""
        return tuple([self.resolve(child, nr) for child, nr in node.next_functions])

    def _open(self, node: Node) -> Region:
        region = self.opened.get(node)
        if region is None:
            region = self.opened[node] = open_region(node, self._beside(node))
            for entry, (child, nr) in zip(region.inputs, node.next_functions, strict=True):
                if entry is not None:
                    self.entries[entry[0]] = None if child is None else (child, nr)
        return region

    def _beside(self, node: Node) -> Iterable[Node]:
        """The nodes that may lie in one non-reentrant checkpoint with this one."""
        outer = next((one.own for one in self.opened.values() if node in one.own), None)
        return _reached(self.roots) if outer is None else outer

    def refuse_closures(self, needed: Collection[Node]) -> None:
        """What a function takes from around it, the engine does not know of when it runs the outer graph."""
        for region in self.opened.values():
            for node, _ in region.outside:
                if node in needed:
                    raise UnsupportedError(
                        f"the function of a reentrant checkpoint uses the result of {op_name(node)} without being "
                        f"given it: pass it as an argument, or use checkpoint(..., use_reentrant=False)"
                    )

    def backward(
        self, starts: Sequence[Slot], cotangents: Sequence[Tensor], slots: Sequence[Slot], *, retain_graph: bool
    ) -> tuple[Tensor | None, ...]:
        """The gradients at ``slots``, inside of regions or outside."""
        run = _Run(self, starts, slots, retain_graph)
        run.piece(None, starts, cotangents)
        return tuple([run.found.get(slot) for slot in slots])


class _Piece(NamedTuple):
    """A part of the graph that the engine runs at once: where it ends, and the checkpoints in it."""

    slots: list[Slot]
    checkpoints: list[Node]


class _Run:
    """One backward."""

    def __init__(self, regions: Regions, starts: Sequence[Slot], slots: Sequence[Slot], retain_graph: bool) -> None:
        self.regions, self.retain_graph = regions, retain_graph
        self.slots = list(dict.fromkeys(slots))
        roots = [node for node, _ in (regions.resolve(*start) for start in starts) if node is not None]
        goals = {node for node, _ in slots}
        self.needed = leading_to(roots, goals, regions.below) | goals
        self.found: dict[Slot, Tensor] = {}

    def piece(self, region: Region | None, starts: Sequence[Slot], cotangents: Sequence[Tensor]) -> Outputs:
        """Run the outer graph, or a region; the gradients of its inputs come back."""
        roots = [node for node, _ in starts]
        inputs = [] if region is None else self._inputs(region)
        slots = [*self._slots(region), *[entry for entry in inputs if entry is not None]]
        checkpoints = [node for node in _reached(roots) if is_reentrant(node)]
        live = [node for node in checkpoints if self._is_needed(node)]
        passed = leading_to(roots, {node for node, _ in slots} | set(live))
        last = [node for node in live if node not in passed]  # to which the engine comes, and goes no further
        asked = [*slots, *[(node, nr) for node in last for nr in range(len(self.regions.opened[node].outputs))]]
        with ExitStack() as stack:
            for node in checkpoints:
                stack.enter_context(run_instead(node, partial(self._through, node)))
            grads = _grad(starts, asked, cotangents, retain_graph=self.retain_graph) if asked else ()
            got = dict(zip(asked, grads, strict=True))
            for node in last:
                self._through(node, [got.pop((node, nr)) for nr in range(len(self.regions.opened[node].outputs))])
        for slot in self._slots(region):
            self._add(slot, got[slot])
        return [None if entry is None else got[entry] for entry in inputs]

    def _through(self, node: Node, grads: Outputs) -> Outputs:
        """A region in the place of its checkpoint's node."""
        region = self.regions.opened.get(node)
        nothing: Outputs = [None] * len(node.next_functions)
        if region is None or not self._is_needed(node):
            return nothing
        given = [(s, g) for s, g in zip(region.outputs, grads, strict=True) if s is not None and g is not None]
        return self.piece(region, [slot for slot, _ in given], [g for _, g in given]) if given else nothing

    def _is_needed(self, node: Node) -> bool:
        """Is something asked for in a region, or below it?"""
        region = self.regions.opened.get(node)
        slots = () if region is None else [self.regions.resolve(*slot) for slot in region.outputs if slot is not None]
        return any(below in self.needed for below, _ in slots)

    def _inputs(self, region: Region) -> list[Slot | None]:
        """The leaves inside, of which the gradients are needed outside."""
        used = [entry if entry is not None and entry[0] in region.leaves else None for entry in region.inputs]
        return [None if e is None or self.regions.resolve(*e)[0] not in self.needed else e for e in used]

    def _slots(self, region: Region | None) -> list[Slot]:
        """What is asked for in this piece; the gradients of leaves are summed over pieces."""
        if region is None:
            inside = [one.own for one in self.regions.opened.values()]
            return [slot for slot in self.slots if not any(slot[0] in own for own in inside)]
        return [slot for slot in self.slots if slot[0] in region.own or slot[0] in region.leaves]

    def _add(self, slot: Slot, g: Tensor | None) -> None:
        if g is not None:
            before = self.found.get(slot)
            self.found[slot] = g if before is None else before + g


def _grad(
    starts: Sequence[Slot], slots: Sequence[Slot], cotangents: Sequence[Tensor], *, retain_graph: bool
) -> tuple[Tensor | None, ...]:
    outputs, inputs = ([GradientEdge(node, nr) for node, nr in many] for many in (starts, slots))
    return torch.autograd.grad(outputs, inputs, cotangents, retain_graph=retain_graph, allow_unused=True)


def _reached(roots: Sequence[Node]) -> list[Node]:
    """All nodes below these, and themselves, as the engine sees them."""
    found = dict.fromkeys(roots)
    for node in (stack := list(found)):  # which grows
        for child, _ in node.next_functions:
            if child is not None and child not in found:
                found[child] = None
                stack.append(child)
    return list(found)
