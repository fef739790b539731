"""Finding the samples: a layout for every cotangent of the tape, from the losses down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.autograd.graph import Node

from .custom import taught
from .flows import FLOWS
from .flows.products import LETTERS
from .flows.registry import whole
from .flows.shapes import SECTIONS
from .invoke import is_compiled, is_opaque
from .layout import Block, Labels, Layout, Shape, join
from .names import POINTWISE, READS
from .probe import probe_node, probe_slots
from .roots import Roots
from .saved import constants, in_checkpoint, is_custom
from .site import Fate, Flow, Site, Sites, weights_only
from .tape import Slot, Tape, is_leaf, op_name

_BY_SHAPE = POINTWISE | {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "T"}
_MOST = 65536
_FATES: dict[tuple[str, Shape, Block, Shape], Block | Flow] = {}  # what was found for such an op before


@dataclass(slots=True)
class Map:
    """Where every sample lies.

    A node is *separable* when all its cotangents are, otherwise *batched*: B cotangents have to be pulled through it.
    Whatever lies below a batched node is batched, too.
    """

    batch: int
    sites: Sites
    cotangents: dict[Slot, Layout | Flow] = field(default_factory=dict)
    flows: dict[tuple[Node, int], Fate] = field(default_factory=dict)  # outputs of separable nodes
    batched: set[Node] = field(default_factory=set)
    probed: set[Node] = field(default_factory=set)  # nodes whose data had to be asked

    def layouts(self, node: Node) -> list[Layout | None]:
        """The layouts of a separable node's cotangents."""
        found = []
        for nr in range(len(self.sites[node].shapes)):
            state = self.cotangents.get((node, nr))
            assert not isinstance(state, Flow)
            found.append(state)
        return found


def assign(tape: Tape, roots: Roots) -> Map:
    """Follow the samples through the whole tape."""
    return _Assignment(tape, roots).run()


class _Assignment:
    """The state of one pass over the tape."""

    def __init__(self, tape: Tape, roots: Roots) -> None:
        self.tape, self.roots = tape, roots
        self.map = Map(roots.batch, Sites(tape))
        self.forced: dict[Slot, Fate] | None = None  # what a real backward showed below custom nodes
        self.settled: dict[Slot, Fate] = {}  # cotangents of which a real backward showed the whole sum

    def run(self) -> Map:
        for slot, layout in self.roots.places:
            if slot[0] in self.tape.edges:
                self._merge(slot, layout)
        cotangents, batched = self.map.cotangents, self.map.batched
        for node in self.tape.order:
            shapes = self.tape.shapes(node)
            states = [cotangents.get((node, nr)) for nr in range(len(shapes))]
            if len(states) == 1 and type(states[0]) is Block and self._flow_by_shape(node, shapes[0], states[0]):
                continue
            if any(isinstance(state, Flow) for state in states):
                batched.add(node)
                cotangents.update((slot, Flow.SHARED) for slot in self.tape.edges[node] if slot is not None)
            elif not is_leaf(node) and any(
                state is not None and 0 not in shape for state, shape in zip(states, shapes, strict=True)
            ):  # a cotangent without elements carries nothing
                self._flow(self.map.sites[node], states)  # type: ignore[arg-type]
        return self.map

    def _flow_by_shape(self, node: Node, shape: Shape, layout: Block) -> bool:
        """The common case, remembered: ops whose flow depends on shapes alone; False if this is not one."""
        name = op_name(node)
        if name not in _BY_SHAPE or is_custom(node) or 0 in shape:
            return False
        flows, cotangents = self.map.flows, self.map.cotangents
        for k, slot in enumerate(self.tape.edges[node]):
            if slot is None:
                continue
            key = (name, shape, layout, self.tape.shape(slot))
            fate = _FATES.get(key)
            if fate is None:
                found = self._by_rule(self.map.sites[node], k, [layout])
                if found is None or found is Flow.PROBE or isinstance(found, Labels):
                    return False
                if len(_FATES) >= _MOST:
                    _FATES.clear()
                fate = _FATES[key] = found
            flows[node, k] = fate
            if slot in cotangents or slot in self.settled:
                self._merge(slot, fate)
            else:
                cotangents[slot] = fate
        return True

    def _flow(self, site: Site, layouts: Sequence[Layout | None]) -> None:
        """Send the layouts of a separable node on to its outputs."""
        asked: list[Fate] = []
        for k, slot in site.outputs:
            fate: Fate = None
            if site.name not in SECTIONS and not is_opaque(site.node):
                fate = whole(layouts, len(self.tape.shape(slot)))
            if fate is None:
                fate = self._by_rule(site, k, layouts)
            if fate is Flow.PROBE:
                fate = self._by_data(site, k, slot, layouts, asked)
            self.map.flows[site.node, k] = fate
            self._merge(slot, fate)

    def _by_data(self, site: Site, k: int, slot: Slot, layouts: Sequence[Layout | None], asked: list[Fate]) -> Fate:
        """Sizes and dims did not decide: is it a weight, and if not, what do this call's numbers say?"""
        if site.is_weight(k):
            return Flow.SHARED
        self.map.probed.add(site.node)
        if is_opaque(site.node) and not is_compiled(site.node):
            return self._by_backward()[slot]
        if not asked:
            asked += probe_node(site, layouts, self.map.batch)
        if asked[k] is Flow.MIXED:
            shared = site.name in LETTERS and not self.tape.reaches(slot[0], self._holds_rows)
            return Flow.SHARED if shared else self._look_again(slot)
        return asked[k]

    def _holds_rows(self, node: Node) -> bool:
        """Does a node compute with rows of data that may be the batch's?"""
        if node not in self.tape.fed and op_name(node) not in READS:
            return False
        return in_checkpoint(node) or any(
            (t.ndim > 1 or not t.is_floating_point()) and len(t) % self.map.batch == 0
            for t in constants(node)
            if t.ndim > 0
        )

    def _look_again(self, slot: Slot) -> Fate:
        """Samples could meet here, random cotangents say; do they in this call, or are they kept apart by zeros?"""
        if any(is_compiled(node) for node in self.tape.order):  # compiled regions may refuse to run while kept
            return Flow.MIXED
        fate = self.settled[slot] = probe_slots(self.tape, self.roots, [slot])[slot]
        if fate is not None:
            self.map.cotangents[slot] = fate
        return fate

    def _by_rule(self, site: Site, k: int, layouts: Sequence[Layout | None]) -> Fate:
        if is_opaque(site.node):
            known = taught(site.node)
            return Flow.PROBE if known is None or known.flow is None else known.flow(site, k, layouts)
        rule = FLOWS.get(site.name)
        return Flow.PROBE if rule is None else rule(site, k, layouts)

    def _by_backward(self) -> dict[Slot, Fate]:
        """What lies below custom nodes, asked once for all of them."""
        if self.forced is None:
            slots = {
                slot
                for node in self.tape.order
                if is_opaque(node) and not is_compiled(node)
                for slot in self.tape.edges[node]
                if slot is not None and not is_leaf(slot[0])
            }
            self.forced = probe_slots(self.tape, self.roots, list(slots))
        return self.forced

    def _merge(self, slot: Slot, fate: Fate) -> None:
        """Add one more contribution to a cotangent."""
        if fate is None or slot in self.settled:
            return
        before = self.map.cotangents.get(slot)
        if before is None:
            self.map.cotangents[slot] = fate
        elif isinstance(before, Flow) or isinstance(fate, Flow):
            both = (before, fate)
            self.map.cotangents[slot] = Flow.MIXED if Flow.MIXED in both else Flow.SHARED
        else:
            joined: Fate = join(before, fate, self.tape.shape(slot))
            if joined is None:
                joined = Flow.MIXED if weights_only(self.tape, slot[0]) else self._look_again(slot)
            self.map.cotangents[slot] = joined or before
