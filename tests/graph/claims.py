"""What a plan claims about a graph, checked by the definition: one sample's cotangent at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from persample.graph.assign import Map
from persample.graph.capture import Plan
from persample.graph.flows import FLOWS
from persample.graph.invoke import call, is_python, sum_to
from persample.graph.layout import Layout, labels
from persample.graph.probe import probe_node
from persample.graph.saved import in_checkpoint
from persample.graph.site import Fate, Flow, Site
from persample.graph.tape import is_leaf
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


def refuted_cotangents(plan: Plan, losses: Tensor) -> list[str]:
    """Backpropagate every single loss: whatever it reaches must be labelled as its own."""
    tape, map = plan.tape, plan.map
    slots = [(node, nr) for node in tape.order for nr in range(len(tape.shapes(node)))]
    claims = [map.cotangents.get(slot) for slot in slots]
    edges = [GradientEdge(node, nr) for node, nr in slots]
    refuted = {}
    for i, one in enumerate(torch.eye(len(losses), dtype=losses.dtype)):
        grads = torch.autograd.grad(losses, edges, one, retain_graph=True, allow_unused=True)
        for slot, claim, g in zip(slots, claims, grads, strict=True):
            if (why := _refutes(claim, g, i)) and slot not in refuted:
                refuted[slot] = f"cotangent {slot[1]} of {slot[0].name()} {tape.shape(slot)}: {why}"
    return list(refuted.values())


def refuted_flows(plan: Plan) -> list[str]:
    """Send random cotangents of every single sample through every separable node: the same for each edge.

    Both answers are held against this: the one that the plan goes by, and the one that the probe gives.
    """
    refuted, seen = [], set()
    for site, layouts in _separable(plan.map):
        key = (site.name, site.shapes, site.edges and tuple(site.target(k) for k, _ in site.targets()), str(layouts))
        if key in seen and site.name in FLOWS:  # rules go by sizes and dims, which a loop repeats many times
            continue
        seen.add(key)
        asked = probe_node(site, layouts, plan.map.batch)
        for i, outputs in enumerate(_one_by_one(site, layouts, plan.map.batch)):
            for k, g in outputs.items():
                for who, fate in (("plan", plan.map.flows.get((site.node, k))), ("probe", asked[k])):
                    if why := _refutes(fate, g, i):
                        refuted.append(f"{who} on output {k} of {site.name} {site.shapes} -> {site.target(k)}: {why}")
    return refuted


def _refutes(claim: Fate, g: Tensor | None, i: int) -> str | None:
    """Why sample i's gradient contradicts the claim, or None. Batched tensors claim nothing."""
    if g is None or isinstance(claim, Flow):
        return None
    reached = g.to_dense() != 0
    if claim is None:
        return f"nothing should arrive, but sample {i} does" if bool(reached.any()) else None
    mark = labels(claim, tuple(g.shape))
    stray = reached & (mark != i)
    if not bool(stray.any()):
        return None
    where = stray.nonzero()[0].tolist()
    return f"{claim} says {int(mark.expand(g.shape)[tuple(where)])} at {where}, but sample {i} is there"


def _separable(map: Map) -> Iterator[tuple[Site, Sequence[Layout | None]]]:
    for node, site in map.sites.items():
        if node in map.batched or is_leaf(node) or is_python(node) or in_checkpoint(node):
            continue
        layouts = map.layouts(node)
        if any(layout is not None for layout in layouts):
            yield site, layouts


def _one_by_one(site: Site, layouts: Sequence[Layout | None], batch: int) -> Iterator[dict[int, Tensor]]:
    """The node's outputs for every sample alone, summed to their targets' shapes as the engine would."""
    for i in range(batch):
        cotangents = [None if lay is None else _noise(site.node, nr, lay, i) for nr, lay in enumerate(layouts)]
        outputs = call(site.node, cotangents, site.edges)
        yield {
            k: sum_to(value, site.target(k), site.metadata(k).dtype)
            for k, _ in site.targets()
            if (value := outputs[k]) is not None
        }


def _noise(node: Node, nr: int, layout: Layout, i: int) -> Tensor:
    meta = node._input_metadata[nr]
    noise = torch.randn(meta.shape, dtype=meta.dtype, generator=torch.Generator().manual_seed(nr))
    return noise.masked_fill(labels(layout, tuple(meta.shape)) != i, 0)
