"""One backward that stops at every parameter's use and keeps the factor instead of the sum.

The engine runs once. Cotangents at the frontier are taken as they arrive, each is turned into a factor, and factors
are pulled back to the parameters. A parameter's factor is handed over as soon as its last use has been seen, so that
it need not outlive the backward. The engine never reaches beyond the frontier, so it is not asked for summed weight
gradients; fused LSTM nodes, which compute all or nothing, are spared them on the way to a layer below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..factors import Dense, Factor, Masked, Part, combine
from . import saved
from .bundles import Bundle
from .custom import taught
from .fallback import push_masked
from .gather import Births, Gathering, changed_in_place
from .invoke import call, is_opaque, sum_to
from .layout import Layout, labels
from .library import unspent
from .ops.broadcast import by_probe
from .ops.recurrence import spared
from .plan import Plan, Route
from .pullback import lifted, pull
from .roots import Roots
from .site import Flow, Site
from .tape import Slot, is_leaf
from .use import Use

Sink = Callable[[str, Factor], None]  # called once per parameter that the losses reach
PartsSink = Callable[[Sequence[str], Factor], None]  # for parameters whose samples are one after another in a factor


class Capture:
    """The state of one backward."""

    def __init__(
        self,
        plan: Plan,
        roots: Roots,
        params: Mapping[str, Tensor],
        sink: Sink,
        plain: Sequence[Slot] = (),
        sink_parts: PartsSink | None = None,
    ) -> None:
        self.plan, self.tape, self.map, self.roots = plan, plan.tape, plan.map, roots
        self.sink = sink
        self.sink_parts = sink_parts
        self.plain = plain  # where ordinary gradients are wanted
        self.gradients: tuple[Tensor | None, ...] = (None,) * len(plain)  # what was found there
        self.names: dict[int, list[str]] = {}
        for name, p in params.items():
            self.names.setdefault(id(p), []).append(name)
        self.terms: dict[Slot, list[Factor]] = {}
        self.waiting = dict(plan.waiting)  # contributions to batched nodes that are still to come
        self.done: set[Node] = set()  # shared tensors whose factors have gone on
        self.pending = dict(plan.frontier)  # frontier nodes whose cotangents have not come yet
        self.terminal = {node for node, _ in plan.requested if not is_leaf(node)}
        self.slow: dict[tuple[str, str], str] = {}  # op and parameter -> what to warn of
        self.slow_below: dict[tuple[str, str], str] = {}  # the same, for batched nodes
        self.record: list[tuple[Site, int, str]] = []  # which use was handled how
        self.lent: list[tuple[ref[Tensor], int]] = []  # PyTorch's tensors that are relied on, and their versions

    def run(self, retain_graph: bool) -> None:
        """Run the backward; the sink has got every factor when it returns."""
        for bundle in self.plan.bundles:
            self._rely_on([t for kept in bundle.kept for t in kept.values()])
        gathered = [Gathering(bundle.nodes, bundle.watch) for bundle in self.plan.bundles]
        handles = [node.register_prehook(partial(self._consume, node)) for node in self.plan.hooked]
        births = Births(self.plan.sources)
        handles += births.hook()
        for gathering in gathered:
            handles += gathering.hook()
        try:
            cotangents = self._backward(retain_graph)
        finally:
            for handle in handles:
                handle.remove()
        births.check(cotangents)
        self._check_unchanged()
        left = [*self.pending, *[node for node in self.plan.rest if node not in self.done and not is_leaf(node)]]
        with torch.no_grad():
            for bundle, gathering in zip(self.plan.bundles, gathered, strict=True):
                self._untie(bundle, gathering.end())
            if any(saved.in_checkpoint(node) for node in left):
                saved.in_own_task(lambda: self._finish(cotangents))  # one recomputation of each region for all of them
            else:
                self._finish(cotangents)

    def _rely_on(self, tensors: Sequence[Tensor]) -> None:
        """These are to stay as they are until the backward is over, or nobody has them any more."""
        self.lent += [(ref(t), saved.version(t)) for t in tensors]

    def _check_unchanged(self) -> None:
        """Factors are made of cotangents and saved tensors, which others may change in place when their turn comes."""
        for reference, version in self.lent:
            t = reference()
            if t is not None and saved.version(t) != version:
                raise changed_in_place(t)

    def _untie(self, bundle: Bundle, cotangents: Mapping[int, Tensor]) -> None:
        """The factors of a bundle's parameters, those whose nodes got a cotangent."""
        if cotangents:
            for k, factor in bundle.factors(self.map.sites, cotangents).items():
                self._deliver_parts([bundle.routes[k][i][1] for i in cotangents], factor)

    def _backward(self, retain_graph: bool) -> dict[Slot, Tensor]:
        requested = self.plan.requested
        if not requested and not self.plain:
            return {}
        with unspent(self.tape.order if retain_graph else ()):
            grads = self.roots.backward([*requested, *self.plain], retain_graph=retain_graph)
        self.gradients = grads[len(requested) :]
        return {slot: g for slot, g in zip(requested, grads, strict=False) if g is not None}

    def _take_requested(self, cotangents: dict[Slot, Tensor]) -> None:
        for slot, g in cotangents.items():
            if is_leaf(slot[0]):
                layout = self.map.cotangents[slot]
                assert isinstance(layout, Layout)
                self._deliver(slot[0], _masked(g, layout))
        for node in list(self.pending):
            count = len(self.tape.shapes(node))
            self._consume(node, [cotangents.pop((node, nr), None) for nr in range(count)])

    def _consume(self, node: Node, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        """Turn a frontier node's cotangents into factors for the shared tensors it used.

        What comes back, if anything, the engine is to give the node instead.
        """
        outputs = self.pending.pop(node, None)
        if outputs is None:
            return None
        site = self.map.sites[node]
        layouts: list[Layout | None] = [None] * len(grads)
        cotangents: list[Tensor | None] = [None] * len(grads)
        for nr, g in enumerate(grads):
            layout = self.map.cotangents.get((node, nr)) if g is not None else None
            if layout is not None:
                assert not isinstance(layout, Flow)
                layouts[nr], cotangents[nr] = layout, g
        found: dict[int, Factor] = {}
        instead = None
        if any(g is not None for g in cotangents):
            self._read_ahead(site)
            found = self._factors(site, outputs, cotangents, layouts)
            instead = spared(site, grads, self.plain)
            site.forget()
        for k in outputs:
            route = self.plan.direct.get((node, k))
            if route is None:
                self._add(site.edges[k], found.get(k))
            elif k in found:
                self._send(found[k], route)
        return instead

    def _send(self, factor: Factor | None, route: Route) -> None:
        """Through the views of a parameter that is used nowhere else."""
        views, leaf = route
        for view in views:
            assert factor is not None
            factor = lifted(self.map.sites[view], factor)
        self._deliver(leaf, factor)

    def _factors(
        self, site: Site, outputs: Sequence[int], cotangents: Sequence[Tensor | None], layouts: Sequence[Layout | None]
    ) -> dict[int, Factor]:
        """By rule where there is one for this layout, the rest by pushing sample after sample through the node."""
        found: dict[int, Factor] = {}
        for k in outputs:
            factor = self._by_rule(Use(site, k, cotangents, layouts, self.map.batch))
            if factor is not None:
                found[k] = factor
                self._rely_on(factor.tensors)
                self.record.append((site, k, f"rule: {type(factor).__name__}"))
        slow = [k for k in outputs if k not in found]
        if slow:
            for k in slow:
                self._note(site, k, self.slow)
                self.record.append((site, k, f"fallback: {self.map.batch} calls of the node"))
            for k, value in push_masked(site, cotangents, layouts, self.map.batch, slow).items():
                found[k] = Dense(value)
        return found

    def _by_rule(self, use: Use) -> Factor | None:
        flow = self.map.flows[use.site.node, use.k]
        if isinstance(flow, Layout):
            return self._separable_edge(use, flow)
        if is_opaque(use.site.node):
            known = taught(use.site.node)
            with saved.unpacked_often(use.site.node):
                return None if known is None else known.factor(use)
        factor = use.site.op.factor(use)
        return factor if factor is not None or flow is Flow.MIXED else by_probe(use)

    def _separable_edge(self, use: Use, flow: Layout) -> Factor | None:
        """Part of a sum that is not separable, but this contribution is: compute it whole, once."""
        value = call(use.site.node, use.cotangents, use.site.edges)[use.k]
        if value is None:
            return None
        return _masked(sum_to(value, use.target, use.site.metadata(use.k).dtype), flow)

    def _note(self, site: Site, k: int, notes: dict[tuple[str, str], str]) -> None:
        """Remember to say that this op was slow, once per parameter."""
        for name in self._names_below(site, k):
            notes.setdefault(
                (site.name, name),
                f"persample has no fast rule for {site.name} on its way to parameter {name!r} "
                f"(cotangents of shape {[tuple(s) for s in site.shapes]}, output {k}): the answer is exact, but "
                f"{self.map.batch} samples go through this op one at a time.",
            )

    def _names_below(self, site: Site, k: int) -> list[str]:
        route, slot = self.plan.direct.get((site.node, k)), site.edges[k]
        if route is not None:
            return self.names[id(self.tape.leaves[route[1]])]
        assert slot is not None
        return [name for name, _ in self.parameters_below(slot[0])]

    def parameters_below(self, node: Node) -> list[tuple[str, str]]:
        """The parameters that a node leads to, each with the node types on one way there."""
        stack: list[tuple[Node, tuple[str, ...]]] = [(node, ())]
        seen, found = set(), []
        while stack:
            here, way = stack.pop()
            if here in seen:
                continue
            seen.add(here)
            if is_leaf(here):
                found += [(name, ", ".join(way)) for name in self.names[id(self.tape.leaves[here])]]
            stack.extend((s[0], (*way, type(here).__name__)) for s in self.tape.edges[here] if s is not None)
        return sorted(found)

    def _read_ahead(self, site: Site) -> None:
        """Read what a checkpointed node saved; and, as its region is there, what the engine will not come to in it."""
        if site.recomputed or not saved.in_checkpoint(site.node):
            return
        site.recomputed = saved.read_ahead(site.node)
        for other in self.terminal:
            if other in self.pending and saved.is_recomputed(other):
                self.map.sites[other].recomputed = saved.read_last(other)

    def _add(self, slot: Slot | None, factor: Factor | None) -> None:
        """One contribution to a shared tensor's factor has come, or turned out to be nothing."""
        assert slot is not None
        arrived = [(slot, factor)]
        while arrived:
            (node, nr), term = arrived.pop()
            if term is not None:
                self.terms.setdefault((node, nr), []).append(term)
            self.waiting[node] -= 1
            if self.waiting[node] == 0:
                if is_leaf(node):
                    self._deliver(node, self._take((node, 0)))
                else:
                    arrived += self._lift(node)

    def _lift(self, node: Node) -> list[tuple[Slot, Factor | None]]:
        """Through a view or cast at once; anything else waits until the engine is done."""
        site = self.map.sites[node]
        slot = site.edges[0] if len(site.edges) == 1 else None
        terms = self.terms.get((node, 0))
        if slot is None or not terms:
            return []
        factor = lifted(site, self._combined(terms))
        if factor is None:
            return []
        del self.terms[node, 0]
        self.done.add(node)
        return [(slot, factor)]

    def _finish(self, cotangents: dict[Slot, Tensor]) -> None:
        """Take what the engine returned, and pull back what is left, from the losses down."""
        self._take_requested(cotangents)
        for node in self.plan.rest:
            if node in self.done:
                continue
            if is_leaf(node):
                self._deliver(node, self._take((node, 0)))
                continue
            site = self.map.sites[node]
            factors = [self._take((node, nr)) for nr in range(len(site.shapes))]
            if any(f is not None for f in factors):
                found, slow = pull(site, factors, self.map.batch)
                for k in found if slow else ():
                    self._note(site, k, self.slow_below)
                    self.record.append((site, k, f"fallback: {self.map.batch} calls of the node"))
                for k, factor in found.items():
                    slot = site.edges[k]
                    assert slot is not None
                    self.terms.setdefault(slot, []).append(factor)

    def _take(self, slot: Slot) -> Factor | None:
        terms = self.terms.pop(slot, None)
        return self._combined(terms) if terms else None

    def _combined(self, terms: Sequence[Factor]) -> Factor:
        """The sum of several uses, of which some have waited."""
        if len(terms) > 1:
            self._check_unchanged()
        return combine(terms)

    def _deliver_parts(self, leaves: Sequence[Node], whole: Factor) -> None:
        """Parameters whose samples are one after another in a factor: at once, if each of them has one name."""
        names = [self.names[id(self.tape.leaves[leaf])] for leaf in leaves]
        if self.sink_parts is not None and all(len(each) == 1 for each in names):
            self.done.update(leaves)
            self.sink_parts([name for (name,) in names], whole)
        else:
            for leaf, part in zip(leaves, Part.all_of(whole, len(leaves)), strict=True):
                self._deliver(leaf, part)

    def _deliver(self, leaf: Node, factor: Factor | None) -> None:
        self.done.add(leaf)
        if factor is not None:
            for name in self.names[id(self.tape.leaves[leaf])]:
                self.sink(name, factor)


def _masked(value: Tensor, layout: Layout) -> Factor:
    return Masked(value, labels(layout, tuple(value.shape), value.device), layout.batch)
