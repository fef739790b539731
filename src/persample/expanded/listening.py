"""What the graph engine does with a registered rule that it meets in a recorded module."""

from __future__ import annotations

from collections.abc import Sequence

from torch.autograd.graph import Node

from ..factors import Dense, Factor, combine
from ..graph.invoke import call
from ..graph.layout import Layout, Shape, sample_dims
from ..graph.nodes import is_leaf
from ..graph.ops.table import Layouts
from ..graph.site import Flow, Outcome, Site
from ..graph.use import Use
from .contributions import contributions
from .samples import along


def stays(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Data keep their samples in the dim in which the results have them; weights are shared."""
    if site.is_weight(k):
        return Flow.SHARED
    batch, dim, target = _batch_dim(layouts, site.shapes), site.node._persample_dim, site.target(k)  # type: ignore[attr-defined]
    if batch is None or len(target) <= dim or target[dim] != batch[0] or batch[1] != (dim,):
        return Flow.PROBE
    return along(target, dim, batch[0])


def _batch_dim(layouts: Sequence[Layout | None], shapes: Sequence[Shape]) -> tuple[int, Shape] | None:
    """How many samples there are, and the dims they have in the first result that is used."""
    for layout, shape in zip(layouts, shapes, strict=True):
        if layout is not None:
            return layout.batch, sample_dims(layout, shape)
    return None


def listen(use: Use) -> Factor | None:
    """Run the rule's backward once, and take what it contributes to the weights."""
    site = use.site
    below = site.node.next_functions
    places = {k: leaf for k, _ in site.outputs if (leaf := _weight_leaf(below[k][0])) is not None}
    if use.k not in places:
        return None
    found, dim = _batch_dim(use.layouts, site.shapes), site.node._persample_dim  # type: ignore[attr-defined]
    if found is None or found[1] != (dim,):
        raise RuntimeError(
            f"the rule {site.name} reads dim {dim} of its results as the batch, but of shapes {list(site.shapes)} the "
            f"samples lie in dims {found and found[1]}"
        )
    if "given" not in site.memo:
        with contributions(list(places.values())) as given:
            returned = call(site.node, use.cotangents, site.edges)
        if any(returned[k] is not None for k in places):
            raise RuntimeError(f"the rule {site.name} returned an ordinary gradient for a weight, which would be lost")
        site.memo["given"] = given
    terms = site.memo["given"].pop(places[use.k], [])  # a weight may be several arguments, and has one factor
    like = next(g for g in use.cotangents if g is not None)
    return combine(terms) if terms else Dense(like.new_zeros(use.batch, *use.target))


def _weight_leaf(node: Node | None) -> Node | None:
    """The leaf of an expanded weight, which is a view of it."""
    below = () if node is None else node.next_functions
    leaf = below[0][0] if len(below) == 1 else None
    return leaf if leaf is not None and is_leaf(leaf) and type(node).__name__ == "AliasBackward0" else None
