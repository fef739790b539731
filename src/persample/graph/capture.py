"""One backward that stops at every parameter's use and keeps the factor instead of the sum.

``plan`` finds the frontier: edges from separable nodes to what all samples share. ``capture`` runs the engine once,
takes the cotangents at the frontier as they arrive, turns each into a factor, and pulls the factors back to
the parameters. The engine never reaches beyond the frontier, so no summed weight gradient is computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from .._errors import InteractionError, PerformanceWarning, UnsupportedError
from ..factors import Dense, Factor, Masked, combine
from . import saved
from .assign import Map, assign
from .fallback import push_masked
from .interaction import interactions
from .invoke import call, is_opaque, sum_to
from .layout import Layout, labels
from .pullback import pull
from .rules import RULES, Use, opaque
from .site import Flow, Site
from .tape import Slot, Tape, is_leaf, walk


@dataclass(slots=True)
class Plan:
    """What to ask the engine for, and where factors are made."""

    tape: Tape
    map: Map
    frontier: dict[Node, list[int]] = field(default_factory=dict)  # separable node -> outputs into shared tensors
    hooked: list[Node] = field(default_factory=list)  # frontier nodes on the way to others: caught in passing
    requested: list[Slot] = field(default_factory=list)  # cotangents the engine returns


def plan(losses: Tensor, params: Sequence[Tensor]) -> Plan:
    """Read the graph and decide, without running anything of it."""
    tape = walk(losses, params)
    found = Plan(tape, assign(tape, losses))
    inner: set[Node] = set()  # nodes from which the engine goes on to something requested
    for node in reversed(tape.order):
        layouts = [found.map.cotangents.get((node, nr)) for nr in range(len(tape.shapes(node)))]
        if node in found.map.batched or not any(layouts):
            continue
        if is_leaf(node):
            found.requested.append((node, 0))
            inner.add(node)
            continue
        outputs = found.map.sites[node].outputs
        crossing = [k for k, slot in outputs if slot[0] in found.map.batched and _flows(found.map, node, k)]
        going_on = any(slot[0] in inner for _, slot in outputs)
        if crossing:
            found.frontier[node] = crossing
            if going_on:
                found.hooked.append(node)
            else:
                found.requested += [(node, nr) for nr, layout in enumerate(layouts) if layout is not None]
        if crossing or going_on:
            inner.add(node)
    return found


def _flows(map: Map, node: Node, k: int) -> bool:
    return map.flows.get((node, k)) is not None


def capture(
    losses: Tensor, params: Mapping[str, Tensor], *, retain_graph: bool, independent: bool = False
) -> dict[str, Factor | None]:
    """Every parameter's factor; None for parameters that the losses do not reach."""
    if losses.grad_fn is None:
        return {
            name: Masked(torch.ones_like(p), torch.arange(len(p)), len(p)) if p is losses else None
            for name, p in params.items()
        }
    if len(losses) == 1:
        return _whole(losses, params, retain_graph)
    found = plan(losses, list(params.values()))
    _check_reached(found.tape, params)
    meeting = interactions(found.tape, found.map)
    if meeting:
        _report_interaction(meeting, independent)
    return Capture(found, losses, params).run(retain_graph)


def _report_interaction(ops: Sequence[str], independent: bool) -> None:
    where = ", ".join(ops)
    if independent:
        raise InteractionError(
            f"samples interact in {where}: one sample's loss depends on another sample. Use layers that keep samples "
            f"apart (e.g. GroupNorm for BatchNorm, or model.eval()), or drop independent=True for exact Jacobian rows"
        )
    warnings.warn(
        f"samples interact in {where}: the answer is the exact Jacobian, at the price of one cotangent per sample for "
        f"everything below.",
        PerformanceWarning,
        stacklevel=4,
    )


def _check_reached(tape: Tape, params: Mapping[str, Tensor]) -> None:
    """Never answer zeros for a parameter that the graph holds under another name."""
    reached = {id(p) for p in tape.leaves.values()}
    hidden = [name for name, p in params.items() if id(p) not in reached and hasattr(p, "_local_tensor")]
    if hidden and tape.others:
        raise UnsupportedError(
            f"sharded parameters {hidden} are not leaves of this graph (the graph holds {len(tape.others)} unsharded "
            f"ones): per-sample gradients of sharded models are not supported here"
        )


def _whole(losses: Tensor, params: Mapping[str, Tensor], retain_graph: bool) -> dict[str, Factor | None]:
    """One sample: an ordinary backward."""
    if not params:
        return {}
    grads = torch.autograd.grad(losses, list(params.values()), retain_graph=retain_graph, allow_unused=True)
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
    return {n: None if g is None else Dense(g.detach().unsqueeze(0)) for n, g in zip(params, dense, strict=True)}


class Capture:
    """The state of one backward."""

    def __init__(self, plan: Plan, losses: Tensor, params: Mapping[str, Tensor], *, quiet: bool = False) -> None:
        self.plan, self.tape, self.map, self.losses = plan, plan.tape, plan.map, losses
        self.names = {id(p): name for name, p in params.items()}
        self.params = params
        self.terms: dict[Slot, list[Factor]] = {}
        self.pending = set(plan.frontier)
        self.quiet = quiet
        self.warned: set[tuple[str, str]] = set()
        self.record: list[tuple[Site, int, str]] = []  # which use was handled how

    def run(self, retain_graph: bool) -> dict[str, Factor | None]:
        handles = [self._hook(node) for node in self.plan.hooked]
        try:
            cotangents = self._backward(retain_graph)
        finally:
            for handle in handles:
                handle.remove()
        self._take_requested(cotangents)
        self._pull_back()
        return self._collect()

    def _hook(self, node: Node) -> RemovableHandle:
        return node.register_prehook(lambda grads: self._consume(node, grads))

    def _backward(self, retain_graph: bool) -> dict[Slot, Tensor]:
        requested = self.plan.requested
        if not requested:
            return {}
        edges = [GradientEdge(node, nr) for node, nr in requested]
        ones = torch.ones_like(self.losses)
        grads = torch.autograd.grad(self.losses, edges, ones, retain_graph=retain_graph, allow_unused=True)
        return {slot: g.detach() for slot, g in zip(requested, grads, strict=True) if g is not None}

    def _take_requested(self, cotangents: dict[Slot, Tensor]) -> None:
        for slot in self.plan.requested:
            node = slot[0]
            if is_leaf(node):
                if slot in cotangents:
                    layout = self.map.cotangents[slot]
                    assert not isinstance(layout, Flow)
                    self._add(slot, _masked(cotangents[slot], layout))
            elif node in self.pending:
                count = len(self.tape.shapes(node))
                self._consume(node, [cotangents.pop((node, j), None) for j in range(count)])

    def _consume(self, node: Node, grads: Sequence[Tensor | None]) -> None:
        """Turn a frontier node's cotangents into factors for the shared tensors it used."""
        if node not in self.pending:
            return
        self.pending.discard(node)
        if all(g is None for g in grads):
            return
        site = self.map.sites[node]
        self._read_ahead(site)
        layouts = [lay if g is not None else None for g, lay in zip(grads, self.map.layouts(node), strict=True)]
        dense = [None if g is None or lay is None else g.detach() for g, lay in zip(grads, layouts, strict=True)]
        slow: list[int] = []
        with torch.no_grad():
            for k in self.plan.frontier[node]:
                factor = self._by_rule(Use(site, k, dense, layouts, self.map.batch))
                slot = site.edges[k]
                assert slot is not None
                if factor is None:
                    slow.append(k)
                else:
                    self._add(slot, factor)
                    self.record.append((site, k, f"rule: {type(factor).__name__}"))
            if slow:
                self._fall_back(site, slow, dense, layouts)
        site.forget()

    def _by_rule(self, use: Use) -> Factor | None:
        flow = self.map.flows[use.site.node, use.k]
        if isinstance(flow, Layout):
            return self._separable_edge(use, flow)
        if is_opaque(use.site.node):
            return None
        fast = RULES.get(use.site.name)
        factor = None if fast is None else fast(use)
        return factor if factor is not None or flow is Flow.MIXED else opaque(use)

    def _separable_edge(self, use: Use, flow: Layout) -> Factor | None:
        """Part of a sum that is not separable, but this contribution is: compute it whole, once."""
        value = call(use.site.node, use.cotangents, use.site.edges)[use.k]
        if value is None:
            return None
        return _masked(sum_to(value, use.target, use.site.metadata(use.k).dtype), flow)

    def _fall_back(
        self,
        site: Site,
        outputs: list[int],
        cotangents: Sequence[Tensor | None],
        layouts: Sequence[Layout | None],
    ) -> None:
        for k in outputs:
            self._warn(site, k)
            self.record.append((site, k, f"fallback: {self.map.batch} calls of the node"))
        for k, value in push_masked(site, cotangents, layouts, self.map.batch, outputs).items():
            slot = site.edges[k]
            assert slot is not None
            self._add(slot, Dense(value))

    def _warn(self, site: Site, k: int) -> None:
        slot = site.edges[k]
        assert slot is not None
        for name, _ in [] if self.quiet else self.parameters_below(slot[0]):
            if (site.name, name) not in self.warned:
                self.warned.add((site.name, name))
                warnings.warn(
                    f"persample has no fast rule for {site.name} on its way to parameter {name!r} "
                    f"(cotangents of shape {[tuple(s) for s in site.shapes]}, output {k}): the answer is exact, but "
                    f"{self.map.batch} samples go through this op one at a time.",
                    PerformanceWarning,
                    stacklevel=2,
                )

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
                found.append((self.names[id(self.tape.leaves[here])], ", ".join(way)))
            stack.extend((s[0], (*way, type(here).__name__)) for s in self.tape.edges[here] if s is not None)
        return sorted(found)

    def _read_ahead(self, site: Site) -> None:
        """In a checkpointed region, read what all its frontier nodes saved, in one recomputation."""
        if not site.recomputed and saved.in_checkpoint(site.node):
            for node, values in saved.read_region(site.node, self.pending).items():
                self.map.sites[node].recomputed = values

    def _add(self, slot: Slot, factor: Factor) -> None:
        self.terms.setdefault(slot, []).append(factor)

    def _pull_back(self) -> None:
        for node in self.tape.order:
            if node not in self.map.batched or is_leaf(node):
                continue
            site = self.map.sites[node]
            factors = [self._take((node, nr)) for nr in range(len(site.shapes))]
            if any(f is not None for f in factors):
                for k, factor in pull(site, factors, self.map.batch).items():
                    slot = site.edges[k]
                    assert slot is not None
                    self._add(slot, factor)

    def _take(self, slot: Slot) -> Factor | None:
        terms = self.terms.pop(slot, None)
        return combine(terms) if terms else None

    def _collect(self) -> dict[str, Factor | None]:
        found = {id(p): self._take((leaf, 0)) for leaf, p in self.tape.leaves.items()}
        return {name: found.get(id(p)) for name, p in self.params.items()}


def _masked(value: Tensor, layout: Layout) -> Factor:
    return Masked(value, labels(layout, tuple(value.shape), value.device), layout.batch)
