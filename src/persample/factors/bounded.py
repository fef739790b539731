"""Weighted sums in which rounding does not let a sample add more than its weight times its norm.

`Factor.weighted_sum` adds up all terms of all samples at once. Where the terms of one sample are huge and cancel, their
rounding errors remain in the sum, and may be larger than the sample's clipped gradient. Such gradients are written out
first, so that what is clipped includes their rounding errors. The bound holds up to a few digits; sums without any
rounding are in `integer_sums`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.norms import wide
from .base import Factor
from .part import regroup, split
from .stacks import real_rows
from .workspace import Workspace

_SMALLEST_WEIGHT = 1e-30  # below, float32 loses digits
_SMALL_SUM = 2**15  # bytes; larger sums of several parameters cost a copy that shows when they are made at once


def bounded_sums(factors: dict[str, Factor], weights: Tensor, space: Workspace) -> dict[str, Tensor]:
    """`bounded_sum` of every factor, in its own dtype; ``factors`` is emptied on the way."""
    tiny, sums = _tiny_weights(weights), dict[str, Tensor]()
    for names, whole in regroup(factors):
        for name in names:
            del factors[name]
        totals = _bounded_sums_of_parts(whole, len(names), weights, tiny, space)
        sums.update((name, total.to(whole.dtype)) for name, total in zip(names, totals, strict=True))
    return sums


def _bounded_sums_of_parts(
    whole: Factor, count: int, weights: Tensor, tiny: Tensor, space: Workspace
) -> Sequence[Tensor]:
    """`bounded_sum` of each of ``count`` equal parts of the samples: at once, unless some have to be written out."""
    small = whole.numel * whole.dtype.itemsize <= _SMALL_SUM
    if count > 1 and small and not tiny.numel() and not (whole.may_cancel and whole.cancelling_samples(space).numel()):
        return whole.weighted_sums_of_parts(count, weights.to(whole.device), space)
    return [bounded_sum(part, weights, space, tiny) for part in split(whole, count)]


def bounded_sum(factor: Factor, weights: Tensor, space: Workspace | None = None, tiny: Tensor | None = None) -> Tensor:
    """(*shape): Σ_b weights[b] · gradient[b], to which no sample adds more than its weight times its norm.

    The gradients of samples whose terms cancel, and of those whose weights are too small for float32, are written out.
    ``tiny`` are the indices of the latter, if they are known.
    """
    weights = weights.to(factor.device)
    apart = _tiny_weights(weights) if tiny is None else tiny.to(factor.device)
    if factor.may_cancel:
        apart = torch.cat([factor.cancelling_samples(space), apart])
    if not apart.numel():
        return factor.weighted_sum(weights, space)
    apart = apart.unique()
    total = factor.weighted_sum(weights.index_fill(0, apart, 0), space)
    return total + _sum_of_stacks(factor[apart], weights[apart], space or Workspace())


def _tiny_weights(weights: Tensor) -> Tensor:
    """The indices of weights that are not zero, but too small for float32."""
    return ((weights < _SMALLEST_WEIGHT) & (weights > 0)).nonzero().squeeze(1)


def _sum_of_stacks(factor: Factor, weights: Tensor, space: Workspace) -> Tensor:
    """(*shape): Σ_b weights[b] · gradient[b] of gradients that are written out, each multiplied in float64."""
    total = torch.zeros(factor.shape, dtype=wide(factor.dtype), device=factor.device)
    into = real_rows(total.unsqueeze(0)).squeeze(0)
    for some, stack in factor.stacks(space):
        for weight, row in zip(weights[some], real_rows(stack), strict=True):
            into += (row.to(weight.dtype) * weight).to(into.dtype)
    return total
