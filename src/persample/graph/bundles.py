"""Uses that are alike, turned into factors together.

In a deep network of small layers, Python costs more per use than the arithmetic. Uses of one kind, with the same
shapes and options, whose samples lie one after another, are one use with more samples: their cotangents and what they
saved are concatenated, and one rule makes the factor of all their parameters, of which each is given its part.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..factors import Factor
from .gather import Watch
from .layout import Block
from .notes import unnoted
from .ops.table import lookup
from .plan import Plan, Route
from .pullback import lifted
from .saved import has, in_checkpoint, metadata, tensor, value
from .site import Sites
from .use import Use

_LARGEST = 2**16  # numbers in a cotangent; of larger ones, a copy costs more than it saves
_MOST = 2**23  # numbers that a forward pass may keep, as bundles wait for the end of the backward
Saved = Mapping[str, Tensor]


@dataclass(slots=True)
class Bundle:
    """Frontier nodes of one kind, and for each of their outputs the way to each parameter."""

    nodes: tuple[Node, ...]
    layout: Block  # of the cotangents of one node
    routes: Mapping[int, tuple[Route, ...]]
    watch: Watch = field(default_factory=Watch)
    kept: Sequence[Saved] = ()  # what every node has saved that will be needed, as the backward lets go of it

    def renamed(self, names: Any) -> Bundle:
        """The same with ``names[node]`` for every node."""
        routes = {
            k: tuple([(tuple([names[view] for view in views]), names[leaf]) for views, leaf in ways])
            for k, ways in self.routes.items()
        }
        return Bundle(tuple([names[node] for node in self.nodes]), self.layout, routes, self.watch)

    @property
    def called(self) -> list[Node]:
        """The nodes that stand for the others like them."""
        return [self.nodes[0], *[view for routes in self.routes.values() for view in routes[0][0]]]

    def read(self) -> None:
        """Keep what the nodes have saved."""
        rowwise = lookup(self.nodes[0]).rowwise
        reads = rowwise.reads if rowwise is not None else {}
        names = dict.fromkeys([name for k in self.routes for name in reads[k]])
        with unnoted():
            self.kept = [{name: tensor(node, name) for name in names} for node in self.nodes]  # type: ignore[misc]

    def is_alike(self) -> bool:
        """Is all that was kept of one kind, and that of the cotangents?"""
        kinds = {
            (about.dtype, about.device, *[None if t is None else (t.dtype, t.device, t.shape) for t in one.values()])
            for one, (about, *_) in zip(self.kept, map(metadata, self.nodes), strict=True)
        }
        first = kinds.pop()
        return (
            None not in first
            and not first[0].is_complex
            and all(kind[:2] == first[:2] for kind in first[2:])
            and not kinds
        )

    def is_as_planned(self) -> bool:
        """The same, if it was so in a graph like this one.

        What a product has saved follows from its weight and its cotangent, both of which are as they were then.
        """
        return lookup(self.nodes[0]).product is not None or self.is_alike()

    def factors(self, sites: Sites, cotangents: Mapping[int, Tensor]) -> dict[int, Factor]:
        """For every output, one factor with the samples of all nodes that got a cotangent, by their places."""
        site, kept = sites[self.nodes[0]], [self.kept[i] for i in cotangents]
        site.recomputed = {name: torch.cat([one[name] for one in kept]) for name in kept[0]}
        layout = Block(len(cotangents) * self.layout.batch, self.layout.inner)
        g, found = torch.cat(list(cotangents.values())), {}
        for k, routes in self.routes.items():
            factor = site.op.factor(Use(site, k, (g,), (layout,), layout.batch))
            for view in routes[0][0]:
                factor = None if factor is None else lifted(sites[view], factor)
            if factor is None:
                raise LookupError(f"the rule for {site.name} gave nothing for {len(cotangents)} uses together")
            found[k] = factor
        site.forget()
        return found


def bundle_up(plan: Plan) -> None:
    """Take the frontier nodes that the engine passes, and that are like one another, out of a plan and into bundles."""
    if plan.activations > _MOST:
        return
    alike: dict[Hashable, list[Node]] = {}
    for node in plan.hooked:
        kind = _kind(plan, node)
        if kind is not None:
            alike.setdefault(kind, []).append(node)
    bundles = [_bundle(plan, nodes) for nodes in alike.values() if len(nodes) > 1]
    for bundle in bundles:
        bundle.read()
    plan.bundles = [bundle for bundle in bundles if bundle.is_alike()]
    taken = {node for bundle in plan.bundles for node in bundle.nodes}
    plan.hooked = [node for node in plan.hooked if node not in taken]
    plan.frontier = {node: outputs for node, outputs in plan.frontier.items() if node not in taken}
    plan.direct = {use: route for use, route in plan.direct.items() if use[0] not in taken}


def _bundle(plan: Plan, nodes: list[Node]) -> Bundle:
    layout = plan.map.cotangents[nodes[0], 0]
    assert isinstance(layout, Block)
    outputs = plan.frontier[nodes[0]]
    return Bundle(tuple(nodes), layout, {k: tuple([plan.direct[node, k] for node in nodes]) for k in outputs})


def _kind(plan: Plan, node: Node) -> Hashable:
    """Equal for nodes that can be in one bundle; None for those that cannot be in any."""
    op, outputs, shapes = lookup(node), plan.frontier[node], plan.tape.shapes(node)
    if op.rowwise is None or not all((node, k) in plan.direct for k in outputs):
        return None
    reads, options = op.rowwise.reads, op.rowwise.options
    layout, size = plan.map.cotangents.get((node, 0)), prod(shapes[0])
    in_order = isinstance(layout, Block) and layout.batch * layout.inner == size
    whole_rows = size and isinstance(layout, Block) and layout.inner % prod(shapes[0][1:]) == 0
    if not in_order or not whole_rows or not reads.keys() >= set(outputs) or size > _LARGEST or in_checkpoint(node):
        return None
    ways = []
    for k in outputs:
        views, leaf = plan.direct[node, k]
        if any(lookup(view).has_options for view in views):
            return None
        ways.append((k, len(views), plan.tape.shapes(leaf), metadata(leaf)[0].dtype))
    below = plan.tape.edges[node][0]
    given = None if below is None else plan.tape.shape(below)  # the input's, if it was computed from parameters
    return op, shapes, given, layout, tuple(ways), tuple([value(node, o) for o in options if has(node, o)])
