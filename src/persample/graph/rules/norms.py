"""Normalisation layers: scale and shift, from what the forward saved."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from ...factors import Dense, Factor
from ..flows.fibres import BATCH_NORMS, normalises_batch
from ..lanes import sum_per_sample
from ..layout import Shape
from .registry import Use, rule


def _affine(use: Use, broadcast: Shape, normalised: Callable[[], Tensor]) -> Factor | None:
    """Σ g · x̂ for the scale (output 1) and Σ g for the shift (output 2), over a sample's positions."""
    if use.k == 0:
        return None
    value = use.g if use.k == 2 else use.g * normalised().to(use.g.dtype)
    summed = sum_per_sample(value.to(use.site.metadata(use.k).dtype), use.layout, broadcast)
    return Dense(summed.reshape(use.batch, *use.target))


def _channels(use: Use) -> Shape:
    """A parameter with one number per channel (dim 1), as it was broadcast."""
    return (use.g.shape[1], *[1] * (use.g.ndim - 2))


@rule("NativeLayerNorm")
def layer_norm(use: Use) -> Factor | None:
    """x̂ = (x - mean) · rstd, normalised over the last dims."""
    saved = use.site.tensor
    return _affine(use, use.target, lambda: (saved("input") - saved("result1")) * saved("result2"))


@rule("FusedRmsNorm")
def rms_norm(use: Use) -> Factor | None:
    """x̂ = x · rstd."""
    return _affine(use, use.target, lambda: use.site.tensor("input") * use.site.tensor("result1"))


@rule("NativeGroupNorm")
def group_norm(use: Use) -> Factor | None:
    """x̂ normalised over each group of channels."""

    def normalised() -> Tensor:
        x, groups = use.site.tensor("input"), use.site.number("group")
        mean, rstd = (use.site.tensor(name).reshape(len(x), groups, 1) for name in ("result1", "result2"))
        grouped = x.reshape(len(x), groups, prod(x.shape[1:]) // groups)
        return ((grouped - mean) * rstd).reshape(x.shape)

    return _affine(use, _channels(use), normalised)


@rule(BATCH_NORMS)
def batch_norm(use: Use) -> Factor | None:
    """x̂ from the running statistics, or from those of the batch, which are constants for scale and shift."""
    site, channels = use.site, _channels(use)

    def normalised() -> Tensor:
        if normalises_batch(site):
            mean, rstd = site.tensor("result1"), site.tensor("result2")
        else:
            mean, rstd = site.tensor("running_mean"), torch.rsqrt(site.tensor("running_var") + site.value("eps"))
        return (site.tensor("input") - mean.reshape(channels)) * rstd.reshape(channels)

    return _affine(use, channels, normalised)
