"""Gradients of what was broadcast along the samples: summed per sample where the engine would sum over all."""

from __future__ import annotations

from torch import Tensor

from ...factors import Dense, Factor
from ..invoke import call
from ..layout import Flow, Layout, Shape
from ..probe import probe_node
from ..sample_rows import sum_per_sample
from ..use import Use


def dense(value: Tensor, layout: Layout, target: Shape) -> Factor:
    """The factor of a broadcast operand, from its gradient before the sum over broadcast dims."""
    return Dense(sum_per_sample(value, layout, target))


def by_probe(use: Use) -> Factor | None:
    """A linear node without a rule, its output not yet summed over broadcast dims: ask whose its elements are."""
    site, k = use.site, use.k
    value = call(site.node, use.cotangents, site.edges)[k]
    if value is None or value.is_sparse or tuple(value.shape) == use.target:
        return None
    outcome = probe_node(site, use.layouts, use.batch, summed=False)[k]
    if outcome is None or isinstance(outcome, Flow):
        return None
    return dense(value.to(site.metadata(k).dtype), outcome, use.target)
