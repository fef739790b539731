"""The graph with its reentrant checkpoints opened: to be read as one, and run piece by piece.

An edge to a checkpoint's node leads on to the region that it stands for, and the region's own inputs lead back to what
the checkpoint was given. The engine knows nothing of that: it runs the outer graph, and where it comes to the node of a
checkpoint, the region is run in its place. So cotangents are summed, and regions let go, as in an ordinary backward.

What the engine cannot know is that a function uses a tensor around it which it was not given. What comes to such a
tensor from a region is found in a run before, and given to the run proper to start from, beside the losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .._errors import UnsupportedError
from .reentrant import Outputs, Region, is_reentrant, open_region, run_instead
from .saved import born
from .tape import Slot, leading_to

Starts = Sequence[tuple[Slot, Tensor]]  # where a backward starts, and the cotangents there


class Regions:
    """The regions of the graph below ``roots``, opened as they are come upon."""

    def __init__(self, roots: Sequence[Node]) -> None:
        self.roots = roots
        self.outer: set[Node] = set()  # the nodes of the graph itself, read when the first region is opened
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
            self.outer = self.outer or set(_reached(self.roots))
            outer = self.owner(node)
            region = open_region(node, self.outer if outer is None else outer.own)
            self.opened[node] = region
            for entry, (child, nr) in zip(region.inputs, node.next_functions, strict=True):
                if entry is not None:
                    self.entries[entry[0]] = None if child is None else (child, nr)
            if outer is not None:  # of which this one may use what nothing else there does
                outer.follow(slot for slot in region.outside if born(slot[0]) > outer.start)
            self._refuse_strangers(region)
        return region

    def _refuse_strangers(self, region: Region) -> None:
        """What a region takes from around may be the outer graph's, or of the regions that it lies in."""
        around = {id(one) for one in self._around(region.node)}
        for node, _ in region.outside:
            owner = self.owner(node)
            if owner is not None and id(owner) not in around:
                raise UnsupportedError(
                    f"the function of a reentrant checkpoint uses a result of {type(node).__name__} that another one "
                    f"computed, without being given it: pass it as an argument"
                )

    def _around(self, node: Node) -> list[Region]:
        """The regions that a checkpoint stands in, the innermost first."""
        outer = self.owner(node)
        return [] if outer is None else [outer, *self._around(outer.node)]

    def settle(self, starts: Starts, slots: Sequence[Slot]) -> Starts:
        """Where else to start from on the way to ``slots``: tensors that regions use without being given them.

        The regions that were run last come first, as what they use may have come out of the others.
        """
        found: list[tuple[Slot, Tensor]] = []
        regions = [region for region in self.opened.values() if region.outside]
        needed = self.leading([slot for slot, _ in starts], slots) if regions else set()
        for region in sorted(regions, key=lambda one: self._when(one.node), reverse=True):
            wanted = [slot for slot in region.outside if self.resolve(*slot)[0] in needed]
            run = _Run(self, [*starts, *found], wanted, True, only=region)
            run.piece(None)
            found += [(slot, run.found[slot]) for slot in wanted if slot in run.found]
        return found

    def leading(self, starts: Iterable[Slot], slots: Iterable[Slot]) -> set[Node | None]:
        """The nodes of these slots, and all between them and the start."""
        roots, goals = ([self.resolve(*slot)[0] for slot in many] for many in (starts, slots))
        return {*leading_to([node for node in roots if node is not None], goals, self.below), *goals} - {None}

    def _when(self, node: Node) -> list[int]:
        """When a checkpoint was run: later ones are larger, and those inside of another are later than that one."""
        return [*[born(region.node) for region in reversed(self._around(node))], born(node)]

    def backward(self, starts: Starts, slots: Sequence[Slot], *, retain_graph: bool) -> tuple[Tensor | None, ...]:
        """The gradients at ``slots``, inside of regions or outside, from all that ``settle`` has found as well."""
        run = _Run(self, starts, slots, retain_graph)
        run.piece(None)
        return tuple([run.found.get(slot) for slot in slots])

    def owner(self, node: Node) -> Region | None:
        """The region that a node lies in."""
        return next((one for one in self.opened.values() if node in one.own), None)


class _Run:
    """One backward, for all slots; or for those that ``only`` one region leads to without having been given them."""

    def __init__(
        self,
        regions: Regions,
        starts: Starts,
        slots: Sequence[Slot],
        retain_graph: bool,
        only: Region | None = None,
    ) -> None:
        self.regions, self.starts, self.retain_graph, self.only = regions, starts, retain_graph, only
        self.slots = list(dict.fromkeys(slots))
        self.needed = regions.leading([slot for slot, _ in starts], self.slots)
        self.found: dict[Slot, Tensor] = {}
        self.held: set[Node] = set()  # checkpoints whose own backward is kept from running

    def piece(self, region: Region | None, starts: Starts = ()) -> Outputs:
        """Run the outer graph, or a region; the gradients of its inputs come back."""
        starts = [*starts, *[start for start in self.starts if self.regions.owner(start[0][0]) is region]]
        roots = [node for (node, _), _ in starts]
        inputs = [] if region is None else self._inputs(region)
        slots = [*self._slots(region), *[entry for entry in inputs if entry is not None]]
        checkpoints = [node for node in _reached(roots) if is_reentrant(node)]
        live = [node for node in checkpoints if self._is_needed(node) and self.regions.owner(node) is region]
        passed = leading_to(roots, {node for node, _ in slots} | set(live))
        last = {node: self._cotangents(node) for node in live if node not in passed}  # the engine goes no further there
        with ExitStack() as stack:
            for node in checkpoints:
                if node not in self.held:  # by the graph around this piece
                    self.held.add(node)
                    stack.callback(self.held.discard, node)
                    stack.enter_context(run_instead(node, partial(self._through, node)))
            for node in self._borders(region):
                stack.callback(node.register_prehook(lambda grads: (None,) * len(grads)).remove)
            keep = self.retain_graph or bool(self._borders(region))
            got = _grad(starts, [*slots, *chain(*last.values())], retain_graph=keep)
            for node, cotangents in last.items():
                self._through(node, [got.pop(slot) for slot in cotangents])
        for slot in self._slots(region):
            self._add(slot, got[slot])
        return [None if entry is None else got[entry] for entry in inputs]

    def _through(self, node: Node, grads: Outputs) -> Outputs:
        """A region in the place of its checkpoint's node."""
        region = self.regions.opened.get(node)
        nothing: Outputs = [None] * len(node.next_functions)
        if region is None or not self._is_needed(node) or (self.only and node in {n for n, _ in self.slots}):
            return nothing
        given = [(s, g) for s, g in zip(region.outputs, grads, strict=True) if s is not None and g is not None]
        return self.piece(region, given) if given else nothing

    def _is_needed(self, node: Node) -> bool:
        """Is something asked for in a region, or below it?"""
        region = self.regions.opened.get(node)
        slots = () if region is None else [self.regions.resolve(*slot) for slot in region.outputs if slot is not None]
        return any(below in self.needed for below, _ in slots)

    def _cotangents(self, node: Node) -> list[Slot]:
        return [(node, nr) for nr in range(len(self.regions.opened[node].outputs))]

    def _inputs(self, region: Region) -> list[Slot | None]:
        """The leaves inside, of which the gradients are needed outside."""
        used = [entry if entry is not None and entry[0] in region.leaves else None for entry in region.inputs]
        return [None if e is None or self.regions.resolve(*e)[0] not in self.needed else e for e in used]

    def _slots(self, region: Region | None) -> list[Slot]:
        """What is asked for in this piece; the gradients of leaves are summed over pieces."""
        if self.only is not None:
            # A node that is asked for its cotangent and goes no further would call the hooks on its tensor before.
            below = [(child, nr) for node, _ in self.slots for child, nr in node.next_functions if child is not None]
            return [*self.slots, *below] if region is self.only else []
        if region is None:
            return [slot for slot in self.slots if self.regions.owner(slot[0]) is None]
        return [slot for slot in self.slots if slot[0] in region.own or slot[0] in region.leaves]

    def _borders(self, region: Region | None) -> set[Node]:
        """Nodes outside that a region leads to, which are not to run with it: their turn is in the outer graph."""
        return set() if region is None or self.only is not None else {node for node, _ in region.outside}

    def _add(self, slot: Slot, g: Tensor | None) -> None:
        if g is not None:
            before = self.found.get(slot)
            self.found[slot] = g if before is None else before + g


def _grad(starts: Starts, slots: Iterable[Slot], *, retain_graph: bool) -> dict[Slot, Tensor | None]:
    asked = list(dict.fromkeys(slots))
    if not asked or not starts:
        return dict.fromkeys(asked)
    outputs, inputs = ([GradientEdge(node, nr) for node, nr in many] for many in ([s for s, _ in starts], asked))
    cotangents = [g for _, g in starts]
    found = torch.autograd.grad(outputs, inputs, cotangents, retain_graph=retain_graph, allow_unused=True)
    return dict(zip(asked, found, strict=True))


def _reached(roots: Sequence[Node]) -> list[Node]:
    """All nodes below these, and themselves, as the engine sees them."""
    found = dict.fromkeys(roots)
    for node in (stack := list(found)):  # which grows
        for child, _ in node.next_functions:
            if child is not None and child not in found:
                found[child] = None
                stack.append(child)
    return list(found)
