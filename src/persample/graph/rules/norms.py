"""Normalisation layers: scale and shift, from what the forward saved."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ...factors import Dense, Factor
from ..flows.fibres import BATCH_NORMS, normalises_batch
from ..lanes import sum_per_sample
from ..layout import Shape
from .broadcast import dense
from .registry import Use, rule


def _affine(use: Use, normalised: Tensor | None, broadcast: Shape) -> Factor:
    """d scale = Σ g · x̂ and d shift = Σ g over a sample's positions, for a parameter broadcast as ``broadcast``."""
    value = use.g if normalised is None else use.g * normalised
    summed = sum_per_sample(value.to(use.site.metadata(use.k).dtype), use.layout, broadcast)
    return Dense(summed.reshape(use.batch, *use.target))


@rule("NativeLayerNorm")
def layer_norm(use: Use) -> Factor | None:
    """x̂ = (x - mean) · rstd, normalised over the last dims."""
    if use.k == 0:
        return None
    if use.k == 2:
        return dense(use.g, use.layout, use.target)
    site = use.site
    x, mean, rstd = site.tensor("input"), site.tensor("result1"), site.tensor("result2")
    return _affine(use, ((x - mean) * rstd).to(use.g.dtype), use.target)


@rule("FusedRmsNorm")
def rms_norm(use: Use) -> Factor | None:
    """x̂ = x · rstd."""
    site = use.site
    if use.k != 1:
        return None
    return _affine(use, (site.tensor("input") * site.tensor("result1")).to(use.g.dtype), use.target)


@rule("NativeGroupNorm")
def group_norm(use: Use) -> Factor | None:
    """x̂ normalised over each group of channels."""
    site, g = use.site, use.g
    channels = (g.shape[1], *[1] * (g.ndim - 2))
    if use.k == 0:
        return None
    if use.k == 2:
        return _affine(use, None, channels)
    x, mean, rstd = site.tensor("input"), site.tensor("result1"), site.tensor("result2")
    groups = site.number("group")
    grouped = x.reshape(len(x), groups, prod(x.shape[1:]) // groups)
    normalised = (grouped - mean.reshape(len(x), groups, 1)) * rstd.reshape(len(x), groups, 1)
    return _affine(use, normalised.reshape(x.shape).to(g.dtype), channels)


@rule(BATCH_NORMS)
def batch_norm(use: Use) -> Factor | None:
    """x̂ from the running statistics, or from those of the batch, which are constants for scale and shift."""
    site, g = use.site, use.g
    channels = (g.shape[1], *[1] * (g.ndim - 2))
    if use.k == 0:
        return None
    if use.k == 2:
        return _affine(use, None, channels)
    x = site.tensor("input")
    if normalises_batch(site):
        mean, rstd = site.tensor("result1"), site.tensor("result2")
    else:
        mean, variance = site.tensor("running_mean"), site.tensor("running_var")
        rstd = torch.rsqrt(variance + site.value("eps"))
    normalised = (x - mean.reshape(channels)) * rstd.reshape(channels)
    return _affine(use, normalised.to(g.dtype), channels)
