"""Normalisation layers: scale and shift, from what the forward saved."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from ...factors import Dense, Factor
from ...kernels.library import group_norm_sums
from ...kernels.norms import wide
from ..flows.fibres import BATCH_NORMS, normalises_batch
from ..lanes import sum_per_sample
from ..layout import Shape, carry
from .broadcast import dense
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
    if use.k != 1:
        return _shift(use)
    return _rows_scaled(use, (saved("input") - saved("result1")).to(use.g.dtype).mul_(use.g), saved("result2"))


@rule("FusedRmsNorm")
def rms_norm(use: Use) -> Factor | None:
    """x̂ = x · rstd."""
    saved = use.site.tensor
    return _rows_scaled(use, saved("input").to(use.g.dtype) * use.g, saved("result1")) if use.k == 1 else None


def _shift(use: Use) -> Factor | None:
    """Σ g over a sample's positions."""
    return dense(use.g.to(use.site.metadata(2).dtype), use.layout, use.target) if use.k == 2 else None


def _rows_scaled(use: Use, rows: Tensor, rstd: Tensor) -> Factor | None:
    """Σ_t rstd_t · rows_t over a sample's positions, as one product."""
    lanes = use.lanes(use.g.ndim - len(use.target))
    if lanes is None:
        return None
    count = rstd.numel()
    scale = lanes.group(rstd.reshape(count).to(rows.dtype)).unsqueeze(1)
    summed = torch.bmm(scale, lanes.group(rows.reshape(count, prod(use.target))))
    return Dense(summed.reshape(use.batch, *use.target).to(use.site.metadata(1).dtype))


@rule("NativeGroupNorm")
def group_norm(use: Use) -> Factor | None:
    """By PyTorch's own kernel. It sums over a batch, not over channels: samples become channels of one image."""
    if use.k == 0:
        return None
    site, size, dtype = use.site, use.g.shape[:2], wide(use.g.dtype)
    if "sums" not in site.memo:
        lines = prod(size), prod(use.g.shape[2:])
        g, x = (t.to(dtype).reshape(lines) for t in (use.g, site.tensor("input")))
        mean, rstd = (site.tensor(name).to(dtype).reshape(-1) for name in ("result1", "result2"))
        site.memo["sums"] = group_norm_sums(g, x, mean, rstd)
    value = site.memo["sums"][use.k - 1].view(size)
    layout = carry(use.layout, tuple(use.g.shape), tuple(size), (0, 1, *[None] * (use.g.ndim - 2)))
    return None if layout is None else dense(value.to(site.metadata(use.k).dtype), layout, use.target)


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
