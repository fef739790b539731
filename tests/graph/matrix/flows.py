"""Flows against the definition: whatever one sample's cotangents reach must be said to be that sample's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from persample.graph.layout import Layout
from persample.graph.locate.probe import probe_node
from persample.graph.ops.dims import whole
from persample.graph.ops.table import named
from persample.graph.read.site import Flow, Outcome, Site
from tests.forms import numbers
from tests.graph.matrix.definition import by_sample
from tests.graph.matrix.nodes import harvest, narrowed
from tests.graph.matrix.places import marks, places
from tests.graph.matrix.rules import Combination, cotangents, subsets
from tests.graph.sites import wanted


def combinations(site: Site, every: bool) -> Iterator[Combination]:
    """Every subset of the cotangents × every place of the first of them."""
    for present in subsets(len(site.shapes)):
        where = places(site.shapes[present.index(True)])
        step = 1 if every or all(present) else 3
        yield from (Combination(present, "contiguous", numbers, layout) for layout in where[::step])


def planned(name: str, every: bool = False) -> Iterator[tuple[Site, Combination]]:
    """All that is asked of one flow; of elementwise ops, which have one flow for all, half of it at a time."""
    for site, _ in harvest()[name]:
        asked = list(combinations(site, every))[:: 1 if every or not named(name).pointwise else 2]
        yield from ((site, combination) for combination in asked)
        for one in narrowed(site):
            yield from ((one, combination) for combination in asked[:: 1 if every else 4])


def outcomes(site: Site, layouts: Sequence[Layout | None]) -> dict[int, Outcome]:
    """What the engine says by sizes and dims, as `assign` does."""
    found: dict[int, Outcome] = {}
    for k in wanted(site):
        one = None if site.op.section else whole(layouts, len(site.target(k)))
        found[k] = one if one is not None else site.op.where(site, k, layouts)
    return found


def probed(site: Site, layouts: Sequence[Layout | None]) -> dict[int, Outcome]:
    """What this call's data say."""
    batch = next(layout.batch for layout in layouts if layout is not None)
    found = probe_node(site, layouts, batch)
    return {k: found[k] for k in wanted(site)}


def wrong_flows(
    site: Site, combination: Combination, ask: Callable[[Site, Sequence[Layout | None]], dict[int, Outcome]] = outcomes
) -> tuple[list[str], int]:
    """What the flow of a node, or whoever is asked, gets wrong, and for how many of its outputs there is an answer."""
    given, layouts = cotangents(site, combination)
    given = [g if g is None or lay is None else _carried(g, lay) for g, lay in zip(given, layouts, strict=True)]
    try:
        said = {k: outcome for k, outcome in ask(site, layouts).items() if outcome is not Flow.PROBE}
    except RuntimeError:
        if by_sample(site, given, layouts) is None:
            return [], 0
        raise
    rows = by_sample(site, given, layouts) if said else None
    if rows is None:
        return [], 0
    reached = {k: (row != 0) & row.isfinite() for k, row in rows.items()}
    found = [
        f"{site.name} {site.shapes} -> output {k} {site.target(k)}, {combination.present}, {layouts}: "
        f"{outcome}, but {why}"
        for k, outcome in said.items()
        if (why := _refuted(site, k, outcome, reached[k]))
    ]
    return found, len(said)


def _carried(g: Tensor, layout: Layout) -> Tensor:
    """Without zeros but for what is nobody's."""
    return torch.where(marks(layout, tuple(g.shape)).any(0), g + 3, torch.zeros((), dtype=g.dtype))


def _refuted(site: Site, k: int, outcome: Outcome, reached: Tensor) -> str | None:
    """Why a claim does not hold for outputs (B, *target) that are reached so."""
    if outcome is None:
        return "something arrives" if bool(reached.any()) else None
    if isinstance(outcome, Flow):
        return None if site.is_weight(k) or bool((reached.sum(0) > 1).any()) else "no two samples meet"
    if outcome.batch != len(reached):
        return f"there are {len(reached)} samples"
    stray = reached & ~marks(outcome, site.target(k))
    return f"there are others at {stray.nonzero()[0].tolist()}" if bool(stray.any()) else None
