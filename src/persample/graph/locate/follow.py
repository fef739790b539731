"""Finding the samples: a layout for every cotangent of the tape, from the losses down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...numberless import NoNumbers, with_numbers
from ..layout import NOBODY, Block, Labels, Layout, Shape, join
from ..ops.custom import is_known, taught
from ..ops.dims import only, whole
from ..ops.table import Op
from ..read.compiled import is_compiled
from ..read.library import unspent
from ..read.nodes import is_opaque
from ..read.notes import lacking
from ..read.roots import Roots
from ..read.saved import in_checkpoint
from ..read.site import Flow, Outcome, Site, Sites, weights_only
from ..read.tape import Slot, Tape
from .constants import Below, below_product
from .contraction import read_contraction
from .probe import probe_call, probe_node, probe_slots

_MOST = 65536
_OUTCOMES: dict[tuple[Op, Shape, Block, Shape], Block | Flow] = {}  # by shape alone, from earlier calls


@dataclass(slots=True)
class SampleMap:
    """Where every sample lies.

    A node is *separable* when all its cotangents are, otherwise *batched*: B cotangents have to be pulled through it.
    Whatever lies below a batched node is batched, too.
    """

    batch: int
    sites: Sites
    cotangents: dict[Slot, Layout | Flow] = field(default_factory=dict)
    flows: dict[tuple[int, int], Outcome] = field(default_factory=dict)  # outputs of separable nodes
    batched: set[int] = field(default_factory=set)
    probed: set[int] = field(default_factory=set)  # nodes for which the data of this call decide

    def sizes(self) -> set[int]:
        """The numbers of rows in which samples of different lengths lie one after another."""
        indices = [state.index for state in self.cotangents.values() if isinstance(state, Labels)]
        ragged = [index for index in indices if index.numel() == max(index.shape, default=0) > 1]
        return {index.numel() for index in ragged if bool((index != NOBODY).all())}

    def layouts(self, node: int) -> list[Layout | None]:
        """The layouts of a separable node's cotangents."""
        layouts = []
        for nr in range(len(self.sites[node].shapes)):
            state = self.cotangents.get((node, nr))
            assert not isinstance(state, Flow)
            layouts.append(state)
        return layouts


@with_numbers
def assign(tape: Tape, roots: Roots) -> SampleMap:
    """Follow the samples through the whole tape."""
    return _Assignment(tape, roots).run()


class _Assignment:
    """The state of one pass over the tape."""

    def __init__(self, tape: Tape, roots: Roots) -> None:
        self.tape, self.roots = tape, roots
        self.samples = SampleMap(roots.batch, Sites(tape))
        self.arrived: dict[int, list[Tensor | None]] = {}  # this call's cotangents of nodes, where these were needed
        self.final: dict[Slot, Outcome] = {}  # cotangents of which a real backward showed the whole sum
        self.labelled: dict[tuple[Op, Shape, Layout, Shape], Layout | Flow] = {}  # `_OUTCOMES`, of this call

    def run(self) -> SampleMap:
        for place, layout in self.roots.places:
            slot = self.tape.graph.slot(place)
            if slot is not None and slot[0] in self.tape.edges:
                self._merge(slot, layout)
        cotangents, batched = self.samples.cotangents, self.samples.batched
        for node in self.tape.order:
            shapes = self.tape.shapes(node)
            states = [cotangents.get((node, nr)) for nr in range(len(shapes))]
            first = states[0] if len(states) == 1 else None
            if isinstance(first, Layout) and self._flow_by_shape(node, shapes[0], first):
                continue
            if any(isinstance(state, Flow) for state in states):
                batched.add(node)
                cotangents.update((slot, Flow.SHARED) for slot in self.tape.edges[node] if slot is not None)
            elif not self.tape.is_leaf(node) and any(
                state is not None and 0 not in shape for state, shape in zip(states, shapes, strict=True)
            ):  # a cotangent without elements carries nothing
                self._flow(self.samples.sites[node], states)  # type: ignore[arg-type]
        return self.samples

    def _flow_by_shape(self, node: int, shape: Shape, layout: Layout) -> bool:
        """The common case, remembered: ops whose flow depends on shapes alone; False if this is not one."""
        op, labelled = self.tape.op(node), isinstance(layout, Labels)
        if not op.by_shape or 0 in shape or (isinstance(layout, Labels) and layout.index.numel() == 1):
            return False
        known: dict[Any, Any] = self.labelled if labelled else _OUTCOMES
        flows, cotangents = self.samples.flows, self.samples.cotangents
        for k, slot in enumerate(self.tape.edges[node]):
            if slot is None:
                continue
            key = (op, shape, layout, self.tape.shape(slot))
            outcome = known.get(key)
            if outcome is None:
                new = self._by_rule(self.samples.sites[node], k, [layout])
                if new is None or new is Flow.PROBE or (isinstance(new, Labels) and not labelled):
                    return False
                if len(known) >= _MOST:
                    known.clear()
                outcome = known[key] = new
            flows[node, k] = outcome
            if slot in cotangents or slot in self.final:
                self._merge(slot, outcome)
            else:
                cotangents[slot] = outcome
        return True

    def _flow(self, site: Site, layouts: Sequence[Layout | None]) -> None:
        """Send the layouts of a separable node on to its outputs."""
        probed: list[Outcome] = []
        for k, slot in site.outputs:
            outcome: Outcome = None
            if not site.op.section and not is_opaque(site.node):
                outcome = whole(layouts, len(self.tape.shape(slot)))
                if outcome is not None and self._is_shared(site, k):
                    outcome = Flow.SHARED
            if outcome is None:
                outcome = self._by_rule(site, k, layouts)
            if outcome is Flow.PROBE:
                outcome = self._by_data(site, k, slot, layouts, probed)
            self.samples.flows[site.index, k] = outcome
            self._merge(slot, outcome)

    def _by_data(
        self, site: Site, k: int, slot: Slot, layouts: Sequence[Layout | None], probed: list[Outcome]
    ) -> Outcome:
        """Sizes and dims did not decide: is it a weight, and if not, what do this call's numbers say?"""
        if self._is_shared(site, k):
            return Flow.SHARED
        if site.op.product is not None and not is_opaque(site.node):
            return self._by_product(site, k, layouts)
        if not self.roots.has_numbers:
            return self._unknown(site)
        self.samples.probed.add(site.index)
        if is_opaque(site.node) and not is_compiled(site.node):
            return self._by_function(site, k, slot, layouts, probed)
        if not probed:
            probed += probe_node(site, layouts, self.samples.batch)
        if probed[k] is not Flow.MIXED or self.compiled:
            return probed[k]
        # Samples could meet here; do they in this call, or are they kept apart by zeros in the cotangent?
        return probe_call(site, self._cotangents(site), layouts, self.samples.batch)[k]

    def _by_product(self, site: Site, k: int, layouts: Sequence[Layout | None]) -> Outcome:
        """Where samples go in a product that contracts them: its other operand was saved, and can be read."""
        origin = below_product(self.tape, self.samples.sites, site, k, self.samples.batch, self.samples.sizes())
        if origin is Below.WEIGHTS:
            return Flow.SHARED  # not one sample's in any case
        if not self.roots.has_numbers:
            return self._unknown(site)
        self.samples.probed.add(site.index)
        layout, hidden = only(layouts), in_checkpoint(site.node)
        outcome = probe_node(site, layouts, self.samples.batch)[k] if hidden else read_contraction(site, k, layout)
        if outcome is not Flow.MIXED or self.compiled:
            return outcome
        cotangents = self._cotangents(site)
        if hidden:
            outcome = probe_call(site, cotangents, layouts, self.samples.batch)[k]
        else:
            outcome = None if cotangents[0] is None else read_contraction(site, k, layout, cotangents[0])
        return Flow.SHARED if outcome is Flow.MIXED and origin is Below.ALIGNED else outcome

    def _unknown(self, site: Site) -> Flow:
        """Data decide, and there are none: samples are taken to meet here, which is exact and slow in any case."""
        lacking(site.node)
        return Flow.MIXED

    def _by_function(
        self, site: Site, k: int, slot: Slot, layouts: Sequence[Layout | None], probed: list[Outcome]
    ) -> Outcome:
        """Where samples go in a custom Function, which is run with the cotangents of this call."""
        cotangents = self._cotangents(site)
        if any(g is None for g in cotangents):  # only the engine knows whether this Function wants zeros or None
            return probe_slots(self.tape, self.roots, [slot], linear=self.linear)[slot]
        if not probed:
            probed += probe_call(site, cotangents, layouts, self.samples.batch, linear=is_known(site.node))
        return probed[k]

    def _is_shared(self, site: Site, k: int) -> bool:
        """Is what output k leads to a weight, for all that is known?"""
        return site.is_weight(k) and not self._is_used_as_data(site, k)

    def _is_used_as_data(self, site: Site, k: int) -> bool:
        """Has a leaf that may be data a place for every sample here, other than as operand of a product?"""
        slot = site.edges[k]
        leaves = set(self.tape.maybe_data)
        unclear = bool(leaves) and slot is not None and not leaves.isdisjoint(self.tape.below(slot[0]))
        return unclear and site.op.product is None and site.shapes[0] == site.target(k)

    @property
    def compiled(self) -> bool:
        """Is there a compiled region, which may refuse to run while the graph is kept?"""
        return any(is_compiled(self.tape.node(n)) for n in self.tape.order)

    @property
    def linear(self) -> bool:
        """Are all backwards linear, as PyTorch's own are?"""
        nodes = map(self.tape.node, self.tape.order)
        return all(is_compiled(node) or not is_opaque(node) or is_known(node) for node in nodes)

    def _look_again(self, slot: Slot) -> Outcome:
        """Two contributions are of different samples at one place; are they in this call, or is one of them zero?"""
        if self.compiled:
            return Flow.MIXED
        if not self.roots.has_numbers:
            lacking(self.tape.node(slot[0]))
            return Flow.MIXED
        outcome = self.final[slot] = probe_slots(self.tape, self.roots, [slot], linear=self.linear)[slot]
        if outcome is not None:
            self.samples.cotangents[slot] = outcome
        return outcome

    def _cotangents(self, site: Site) -> list[Tensor | None]:
        """The cotangents that this call's backward brings to a node; one backward serves all custom ones."""
        if site.index not in self.arrived:
            tape = self.tape
            custom = [n for n in tape.order if is_opaque(tape.node(n)) and not is_compiled(tape.node(n))]
            nodes = custom if site.index in custom else [site.index]
            below = dict.fromkeys(slot for n in nodes for slot in tape.edges[n] if slot is not None)
            with unspent(map(tape.node, tape.order)):
                arrived = self.roots.passing([tape.node(n) for n in nodes], [tape.graph.at(slot) for slot in below])
            self.arrived |= {n: arrived[tape.node(n)] for n in nodes}
        return self.arrived[site.index]

    def _by_rule(self, site: Site, k: int, layouts: Sequence[Layout | None]) -> Outcome:
        if is_opaque(site.node):
            known = taught(site.node)
            return Flow.PROBE if known is None else known.where(site, k, layouts)
        try:
            return site.op.where(site, k, layouts)
        except NoNumbers:  # of the indices by which elements were chosen
            return self._unknown(site)

    def _merge(self, slot: Slot, outcome: Outcome) -> None:
        """Add one more contribution to a cotangent."""
        if outcome is None or slot in self.final:
            return
        before = self.samples.cotangents.get(slot)
        if before is None:
            self.samples.cotangents[slot] = outcome
        elif isinstance(before, Flow) or isinstance(outcome, Flow):
            both = (before, outcome)
            self.samples.cotangents[slot] = Flow.MIXED if Flow.MIXED in both else Flow.SHARED
        else:
            joined: Outcome = join(before, outcome, self.tape.shape(slot))
            if joined is None:
                joined = Flow.MIXED if weights_only(self.tape, slot[0]) else self._look_again(slot)
            self.samples.cotangents[slot] = joined or before
