"""Weighted sums in which rounding does not let a sample add more than its weight times its norm.

`Factor.weighted_sum` adds up all terms of all samples at once. Where the terms of one sample are huge and cancel, their
rounding errors remain in the sum, and may be larger than the sample's clipped gradient. Such gradients are written out
first, so that what is clipped includes their rounding errors. The bound holds up to a few digits; sums without any
rounding are in `integer_sums`.

Where numbers cannot be looked at, nothing is written out: `terms_are_bounded` says whether that was right. Factors that
find such samples by themselves, when a graph runs, need no such answer (`Factor.bounds_sums`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from ..kernels.devices import can_look
from ..kernels.norms import wide
from .base import Factor
from .dense import small_stacks
from .part import regroup, split
from .stacks import real_rows
from .workspace import Workspace

SMALLEST_WEIGHT = 1e-30  # below, float32 loses digits
_SMALL_SUM = 2**15  # bytes; larger sums of several parameters cost a copy that shows when they are made at once


def bounded_sums(factors: dict[str, Factor], weights: Tensor, space: Workspace) -> dict[str, Tensor]:
    """`bounded_sum` of every factor, in its own dtype; ``factors`` is emptied on the way."""
    if not can_look(weights.device):
        return _sums_without_looking(factors, weights, space)
    tiny, sums = _tiny_weights(weights), dict[str, Tensor]()
    for names, whole in regroup(factors):
        for name in names:
            del factors[name]
        totals = _bounded_sums_of_parts(whole, len(names), weights, tiny, space)
        sums.update((name, total.to(whole.dtype)) for name, total in zip(names, totals, strict=True))
    return sums


def _sums_without_looking(factors: dict[str, Factor], weights: Tensor, space: Workspace) -> dict[str, Tensor]:
    """`weighted_sum` of every factor: small ones at once, and weights converted once."""
    converted = cache(lambda device, dtype: weights.to(device, dtype.to_real()))
    sums = dict[str, Tensor]()
    for names, small in small_stacks(factors):
        sums |= zip(names, small.weighted_sums(converted(small.device, wide(small.dtype))), strict=True)
        for name in names:
            del factors[name]
    for names, whole in regroup(factors):
        for name in names:
            del factors[name]
        each = converted(whole.device, wide(whole.dtype))
        if whole.bounds_sums or len(names) == 1:
            totals: Sequence[Tensor] = [part.bounded_sum(each, space) for part in split(whole, len(names))]
        else:
            totals = whole.weighted_sums_of_parts(len(names), each, space)
        sums.update((name, total.to(whole.dtype)) for name, total in zip(names, totals, strict=True))
    return sums


def terms_are_bounded(factors: Mapping[str, Factor], space: Workspace) -> list[Tensor]:
    """Bools: do the terms of every sample cancel so little that it need not be written out?"""
    answers = []
    for (most, _), pairs in _terms_and_norms(factors, space).items():
        terms, sums = (torch.cat(every) if len(every) > 1 else every[0] for every in zip(*pairs, strict=True))
        answers.append(terms <= most * sums)
    return answers


def _terms_and_norms(
    factors: Mapping[str, Factor], space: Workspace
) -> dict[tuple[float, torch.device], list[tuple[Tensor, Tensor]]]:
    """The norms of terms that may cancel, and of their sums, by how much larger the former may be, and by device."""
    pairs: dict[tuple[float, torch.device], list[tuple[Tensor, Tensor]]] = {}
    for _, whole in regroup(factors):
        if whole.may_cancel and not whole.bounds_sums and whole.batch and whole.numel:
            key = whole.largest_cancellation, whole.device
            pairs.setdefault(key, []).append((whole.term_norms(), whole.cached_norms(space)))
    return pairs


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
    return ((weights < SMALLEST_WEIGHT) & (weights > 0)).nonzero().squeeze(1)


def _sum_of_stacks(factor: Factor, weights: Tensor, space: Workspace) -> Tensor:
    """(*shape): Σ_b weights[b] · gradient[b] of gradients that are written out, each multiplied in float64."""
    total = torch.zeros(factor.shape, dtype=wide(factor.dtype), device=factor.device)
    into = real_rows(total.unsqueeze(0)).squeeze(0)
    for some, stack in factor.stacks(space):
        for weight, row in zip(weights[some], real_rows(stack), strict=True):
            into += (row.to(weight.dtype) * weight).to(into.dtype)
    return total
