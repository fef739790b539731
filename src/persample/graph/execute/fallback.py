"""Where no rule serves: the exact slow way, one sample's cotangent at a time through one node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...factors import Factor
from ...kernels.differentiable import differentiable, is_differentiable
from ...kernels.library import materialized
from ...numberless import has_numbers
from ..layout import Flow, Layout, labels
from ..locate.probe import probe_node
from ..ops.broadcast import dense
from ..ops.use import Use
from ..read.invoke import call, call_each, sum_to
from ..read.nodes import is_opaque
from ..read.notes import lacking
from ..read.saved import holds_sparse, in_backward, in_checkpoint, in_own_task, in_plain_task, mesh
from ..read.site import Site


def one_hot_cotangents(g: Tensor, layout: Layout) -> Iterable[Tensor]:
    """For every sample, ``g`` with all other samples' elements set to zero."""
    sample_index = labels(layout, tuple(g.shape), g.device)
    zero = torch.zeros((), dtype=g.dtype, device=g.device)
    return (torch.where(sample_index == i, g, zero) for i in range(layout.batch))


def push_masked(
    site: Site,
    cotangents: Sequence[Tensor | None],
    layouts: Sequence[Layout | None],
    batch: int,
    wanted: Sequence[int],
) -> dict[int, Tensor]:
    """(B, *target) for every wanted output of a separable node."""
    per_cotangent = [
        iter(one_hot_cotangents(g, layout)) if g is not None and layout is not None else None
        for g, layout in zip(cotangents, layouts, strict=True)
    ]
    rows = ([None if rows_of_one is None else next(rows_of_one) for rows_of_one in per_cotangent] for _ in range(batch))
    return _loop(site, rows, batch, wanted)


def loops(site: Site) -> bool:
    """Will stacks go through this node one sample at a time, for want of anything better?"""
    return not site.op.vmap or is_opaque(site.node)


def push_stacked(site: Site, stacks: Sequence[Tensor | None], batch: int, wanted: Sequence[int]) -> dict[int, Tensor]:
    """(B, *target) for every wanted output of a node whose cotangents are (B, *shape)."""
    if not (loops(site) or in_checkpoint(site.node) or holds_sparse(site.node) or mesh(site.node) is not None):
        return _vmapped(site, stacks, wanted)
    rows = ([None if s is None else s[i] for s in stacks] for i in range(batch))
    return _loop(site, rows, batch, wanted)


def _vmapped(site: Site, stacks: Sequence[Tensor | None], wanted: Sequence[int]) -> dict[int, Tensor]:
    live = [materialized(s) for s in stacks if s is not None]

    def one(*cotangents: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(cotangents)
        outputs = call(site.node, [None if s is None else next(remaining) for s in stacks], site.edges)
        return tuple(_finish(site, k, outputs[k]) for k in wanted)

    results: list[tuple[Tensor, ...]] = []
    if in_backward() and not in_plain_task():  # a task cannot be opened under vmap
        in_own_task(lambda: results.append(torch.vmap(one)(*live)))
    else:
        results.append(torch.vmap(one)(*live))
    return dict(zip(wanted, results[0], strict=True))


def _loop(site: Site, rows: Iterable[Sequence[Tensor | None]], batch: int, wanted: Sequence[int]) -> dict[int, Tensor]:
    if is_differentiable():
        return _stacked(site, rows, wanted)
    results = {}
    for k in wanted:
        meta = site.metadata(k)
        results[k] = torch.empty((batch, *meta.shape), dtype=meta.dtype, device=meta.device)
    place = iter(range(batch))

    def take(outputs: Sequence[Tensor | None]) -> None:
        i = next(place)
        for k in wanted:
            results[k][i] = _finish(site, k, outputs[k])

    call_each(site.node, rows, site.edges, take)
    return results


def _stacked(site: Site, rows: Iterable[Sequence[Tensor | None]], wanted: Sequence[int]) -> dict[int, Tensor]:
    """`_loop` with a graph, in which every write into one tensor would be a step."""

    def take(outputs: Sequence[Tensor | None]) -> list[Tensor]:
        return [_finish(site, k, outputs[k]) for k in wanted]

    taken = call_each(site.node, rows, site.edges, take)
    return {k: torch.stack(each) for k, each in zip(wanted, zip(*taken, strict=True), strict=True)}


def _finish(site: Site, k: int, value: Tensor | None) -> Tensor:
    meta = site.metadata(k)
    if value is None:
        return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
    return sum_to(value, site.target(k), meta.dtype)


def called(use: Use) -> Tensor | None:
    """What a node computes for the tensor whose gradient is asked for: the sum over all samples."""
    value = call(use.site.node, use.cotangents, use.site.edges)[use.k]
    return None if value is None else sum_to(value, use.target, use.site.metadata(use.k).dtype)


def sum_by_probe(use: Use) -> Factor | None:
    """A linear node without a rule, its output not yet summed over broadcast dims: probe whose its elements are."""
    site, k = use.site, use.k
    value = call(site.node, use.cotangents, site.edges)[k]
    if value is None or value.is_sparse or tuple(value.shape) == use.target:
        return None
    if not has_numbers(value):
        lacking(site.node)
        return None
    with differentiable(False):
        outcome = probe_node(site, use.layouts, use.batch, summed=False)[k]
    if outcome is None or isinstance(outcome, Flow):
        return None
    return dense(value.to(site.metadata(k).dtype), outcome, use.target)
