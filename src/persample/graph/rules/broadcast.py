"""Parameters that were broadcast along the samples: biases, scales, tokens, gates."""

from __future__ import annotations

import torch
from torch import Tensor

from ...factors import Dense, Factor
from ..invoke import call
from ..lanes import sum_per_sample
from ..layout import Layout, Shape, labels
from ..names import POINTWISE
from ..probe import probe_node
from ..site import Flow
from .registry import Use, rule


def dense(value: Tensor, layout: Layout, target: Shape) -> Factor:
    """The factor of a broadcast operand, from its gradient before the sum over broadcast dims."""
    return Dense(sum_per_sample(value, layout, target))


@rule(" ".join(POINTWISE))
def pointwise(use: Use) -> Factor | None:
    """An elementwise op's own backward, summed per sample where the engine would sum over all."""
    value = _operand_gradient(use)
    if value is None or value.shape != use.g.shape:
        return None
    if value.is_complex() and not use.site.metadata(use.k).dtype.is_complex:
        value = value.real
    return dense(value.to(use.site.metadata(use.k).dtype), use.layout, use.target)


def _operand_gradient(use: Use) -> Tensor | None:
    """d loss / d operand before the sum; the common ops without computing the other operand's."""
    site, g, k = use.site, use.g, use.k
    name = site.name
    if name == "Expand" or (name == "Add" and (k == 0 or site.value("alpha") == 1)):
        return g
    if name == "Sub" and (k == 0 or site.value("alpha") == 1):
        return g if k == 0 else -g
    if name == "Mul" and len(site.edges) == 2 and not g.is_complex():  # with one, the other operand is a number
        other = site.optional("self" if k == 1 else "other")
        if other is not None and not other.is_complex():
            return g * other
    return call(site.node, use.cotangents, site.edges)[k]


def by_probe(use: Use) -> Factor | None:
    """A linear node without a rule, its output not yet summed over broadcast dims: ask whose its elements are."""
    site, k = use.site, use.k
    value = call(site.node, use.cotangents, site.edges)[k]
    if value is None or value.is_sparse or tuple(value.shape) == use.target:
        return None
    fate = probe_node(site, use.layouts, use.batch, summed=False)[k]
    if fate is None or isinstance(fate, Flow):
        return None
    return dense(value.to(site.metadata(k).dtype), fate, use.target)


@rule("Repeat")
def repeat(use: Use) -> Factor | None:
    """(r0·n0, r1·n1, …) as (r0, n0, r1, n1, …), summed over the r's."""
    repeats = use.site.numbers("repeats")
    target = (1,) * (len(repeats) - len(use.target)) + use.target
    split = [n for pair in zip(repeats, target, strict=True) for n in pair]
    mark = labels(use.layout, tuple(use.g.shape)).expand(use.g.shape).reshape(split)
    value = use.g.reshape(split)
    over = [2 * d for d in range(len(repeats))]
    rows = value.permute(*over, *[d + 1 for d in over]).reshape(-1, *target)
    first = mark.permute(*over, *[d + 1 for d in over]).reshape(len(rows), -1)
    if first.shape[1] and not torch.equal(first, first[:, :1].expand_as(first)):
        return None
    index = first[:, 0] if first.shape[1] else first.new_full((len(rows),), -1)
    live = (index >= 0).to(rows.device)
    total = rows.new_zeros(use.batch, *target).index_add_(0, index.to(rows.device)[live], rows[live])
    return Dense(total.reshape(use.batch, *use.target))
