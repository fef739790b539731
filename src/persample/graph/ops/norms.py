"""Normalisation layers: scale and shift, from what the forward saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...factors import ByRows, Dense, Factor, combine
from ...factors.maps import inner_with, scaled, transposed
from ...kernels.differentiable import is_differentiable
from ...kernels.library import group_norm_sums
from ...kernels.norms import wide
from ..layout import Flow, Outcome, Shape, carry, sample_dims
from ..read.site import Site
from ..sample_rows import sum_per_sample
from . import convolutions
from .broadcast import dense
from .dims import follow, keep, leading, only
from .table import Aten, Layouts, Rowwise, op
from .use import Use


def rows(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Mixes the last dims."""
    shape = site.shapes[0]
    return keep(only(layouts), shape, site.target(k), leading(shape, _kept(site)))


def shared_by_rows(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Scale and shift are shared by all rows."""
    kept = _kept(site)
    return Flow.SHARED if all(d < kept for d in sample_dims(only(layouts), site.shapes[0])) else Flow.PROBE


def _kept(site: Site) -> int:
    return len(site.shapes[0]) - len(site.numbers("normalized_shape"))


def last_dims(site: Site) -> tuple[Shape, Shape]:
    """The normalised dims."""
    shape = site.shapes[0]
    return shape, tuple(range(_kept(site), len(shape)))


def group_dims(site: Site) -> tuple[Shape, Shape]:
    """The channels of a group, and all positions."""
    shape = site.shapes[0]
    return convolutions.by_group(shape, site.number("group")), tuple(range(2, len(shape) + 1))


def channels(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Channels (dim 1) are apart from one another; the rest is mixed in training mode, left alone in eval mode."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    if not _averages_batch(site) and shape == target:
        return layout
    return keep(layout, shape, target, [d if d == _channel(shape) else None for d in range(len(shape))])


def shared_by_channels(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Scale and shift have one number per channel."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    moved = follow(layout, shape, target, [0 if d == _channel(shape) else None for d in range(len(shape))], 1)
    return Flow.SHARED if moved is None else moved


def _channel(shape: Shape) -> int:
    return 1 if len(shape) > 1 else 0


def _averages_batch(site: Site) -> bool:
    return site.op.averages_batch is not None and site.op.averages_batch(site)


def _affine(use: Use, broadcast: Shape, normalised: Callable[[], Tensor]) -> Factor | None:
    """Σ g · x̂ for the scale (output 1) and Σ g for the shift (output 2), over a sample's positions."""
    if use.k == 0:
        return None
    g = use.g.to(wide(use.g.dtype))
    summed = sum_per_sample(g if use.k == 2 else g * normalised().to(g.dtype), use.layout, broadcast)
    return Dense(summed.reshape(use.batch, *use.target).to(use.site.metadata(use.k).dtype))


def _channels(use: Use) -> Shape:
    """A parameter with one number per channel (dim 1), as it was broadcast."""
    return (use.g.shape[1], *[1] * (use.g.ndim - 2))


def _centred(x: Tensor, dims: list[int], rstd: Tensor) -> tuple[Tensor, Tensor]:
    """x less its mean, and one over its deviation, computed again with their graphs: what ops save has none."""
    centred = x - x.mean(dims, keepdim=True)
    return centred, _over_deviation(centred, dims, rstd)


def _over_deviation(centred: Tensor, dims: list[int], rstd: Tensor) -> Tensor:
    """``rstd`` as a function of the variance, to which something was added that follows."""
    variance = centred.square().mean(dims, keepdim=True)
    return torch.rsqrt(variance + (rstd.reshape(variance.shape).pow(-2) - variance.detach()))


def layer_norm(use: Use) -> Factor | None:
    """x̂ = (x - mean) · rstd, normalised over the last dims."""
    saved, dtype = use.site.tensor, wide(use.g.dtype)
    if use.k != 1:
        return _shift(use)
    if is_differentiable():
        centred, rstd = _centred(saved("input").to(dtype), _last(use), use.site.result("result2"))
        return _rows_scaled(use, centred * use.g, rstd)
    return _rows_scaled(use, (saved("input").to(dtype) - saved("result1")).mul_(use.g), saved("result2"))


def rms_norm(use: Use) -> Factor | None:
    """x̂ = x · rstd."""
    saved, dtype = use.site.tensor, wide(use.g.dtype)
    if use.k != 1:
        return None
    if is_differentiable():
        x = saved("input").to(dtype)
        rstd = _over_deviation(x, _last(use), use.site.result("result1"))
        return _rows_scaled(use, x * use.g, rstd)
    return _rows_scaled(use, saved("input").to(dtype) * use.g, saved("result1"))


def _last(use: Use) -> list[int]:
    """The normalised dims, counted from the end."""
    return [-d - 1 for d in range(len(use.target))]


def _shift(use: Use) -> Factor | None:
    """Σ g over a sample's positions."""
    return dense(use.g, use.layout, use.target, use.site.metadata(2).dtype) if use.k == 2 else None


def _rows_scaled(use: Use, rows: Tensor, rstd: Tensor) -> Factor | None:
    """Σ_t rstd_t · rows_t over a sample's positions, as one product."""
    samples = use.rows(use.g.ndim - len(use.target))
    if samples is None:
        return None
    count, dtype = rstd.numel(), use.site.metadata(1).dtype

    def summed(sides: list[Tensor]) -> Tensor:
        return torch.bmm(sides[0].unsqueeze(1), sides[1]).reshape(len(sides[0]), *use.target).to(dtype)

    return samples.written_out([rstd.reshape(count).to(rows.dtype), rows.reshape(count, prod(use.target))], summed)


def group_norm(use: Use) -> Factor | None:
    """By PyTorch's own kernel. It sums over a batch, not over channels: samples become channels of one image."""
    if use.k == 0:
        return None
    site, size, dtype = use.site, use.g.shape[:2], wide(use.g.dtype)
    if "sums" not in site.memo and is_differentiable():
        site.memo["sums"] = _differentiable_sums(use.g.to(dtype), site.tensor("input").to(dtype), site)
    if "sums" not in site.memo:
        lines = prod(size), prod(use.g.shape[2:])
        g, x = (t.to(dtype).reshape(lines) for t in (use.g, site.tensor("input")))
        mean, rstd = (site.tensor(name).to(dtype).reshape(-1) for name in ("result1", "result2"))
        site.memo["sums"] = group_norm_sums(g, x, mean, rstd)
    value = site.memo["sums"][use.k - 1].reshape(size)
    layout = carry(use.layout, tuple(use.g.shape), tuple(size), (0, 1, *[None] * (use.g.ndim - 2)))
    return None if layout is None else dense(value, layout, use.target, site.metadata(use.k).dtype)


def _differentiable_sums(g: Tensor, x: Tensor, site: Site) -> tuple[Tensor, Tensor]:
    """`group_norm_sums` of every image, (N, C) each: Σ g · x̂ is (Σ g · x - mean Σ g) · rstd.

    Other than those of a layer norm, the statistics of a group norm are results that PyTorch differentiates.
    """
    groups = len(x), site.number("group"), -1
    mean, rstd = (site.tensor(name).to(x.dtype).unsqueeze(2) for name in ("result1", "result2"))
    products, sums = ((t if t.ndim == 2 else t.flatten(2).sum(2)).reshape(groups) for t in (g * x, g))
    return (products - mean * sums) * rstd, sums


def batch_norm(use: Use) -> Factor | None:
    """x̂ from the running statistics, or from those of the batch, which are constants for scale and shift."""
    site, channels = use.site, _channels(use)

    def normalised() -> Tensor:
        if _averages_batch(site) and is_differentiable():
            others = [d for d in range(use.g.ndim) if d != 1]
            x = site.tensor("input")
            centred, rstd = _centred(x.to(wide(x.dtype)), others, site.result("result2"))
            return centred * rstd
        if _averages_batch(site):
            mean, rstd = site.tensor("result1"), site.tensor("result2")
        else:
            mean, var = site.tensor("running_mean"), site.tensor("running_var")
            rstd = torch.rsqrt(var.to(wide(var.dtype)) + site.value("eps"))
        x = site.tensor("input")
        return (x.to(wide(x.dtype)) - mean.reshape(channels)) * rstd.reshape(channels)

    return _affine(use, channels, normalised)


def weight_norm(site: Site, dw: Tensor) -> dict[int, Factor]:
    """w = g v / ‖v‖, norms over all dims but one: dg = Σ dw v / ‖v‖ and dv = g / ‖v‖ (dw - v dg / ‖v‖)."""
    dtype = dw.dtype
    dw, v, g, norm = (t.to(wide(t.dtype)) for t in (dw, site.tensor("v"), site.tensor("g"), _norms_of_weight(site)))
    others = [d + 1 for d in range(v.ndim) if d != site.number("dim") % v.ndim]
    norm = norm.reshape([n if d + 1 not in others else 1 for d, n in enumerate(v.shape)])
    dg = ((dw * v).sum(others, keepdim=True)) / norm
    dv = g / norm * (dw - v * dg / norm)
    return {0: Dense(dv.to(dtype)), 1: Dense(dg.reshape(len(dw), *g.shape).to(dtype))}


def _norms_of_weight(site: Site) -> Tensor:
    """‖v‖ over all dims but one, computed again if its graph is needed."""
    if not is_differentiable():
        return site.tensor("result1")
    v = site.tensor("v")
    kept = site.number("dim") % v.ndim
    norms: Tensor = torch.linalg.vector_norm(v, dim=[d for d in range(v.ndim) if d != kept], dtype=wide(v.dtype))
    return norms


def through_weight_norm(site: Site, k: int, factor: Factor) -> Factor | None:
    """The same where norms are those of rows: dg are inner products, and dv is dw, scaled by rows, less scaled v.

    Columns of a matrix are rows of the transposed one.
    """
    v, norm, dim = site.tensor("v"), _norms_of_weight(site), site.number("dim")
    dim %= v.ndim
    if not (dim == 0 or (dim == 1 and v.ndim == 2)) or v.is_complex() or v.dtype != wide(v.dtype):
        return None
    rows, turned = (v, factor) if dim == 0 else (v.t(), transposed(factor))
    shape = (len(rows), *[1] * (v.ndim - 1))
    if site.memo.get("of") is not factor:  # both outputs need it
        inner = inner_with(turned, rows, shape)
        site.memo.update(of=factor, dg=None if inner is None else scaled(inner, norm.reshape(shape).reciprocal()))
    dg: Factor | None = site.memo["dg"]
    if k == 1 or dg is None:
        return dg if dim == 0 or dg is None else transposed(dg)
    scale = (site.tensor("g").reshape(shape) / norm.reshape(shape)).to(factor.dtype)
    along = scaled(turned, scale)
    if along is None:
        return None
    less = dg.stack().flatten(1) * (-scale / norm.reshape(shape)).flatten()
    dv = combine([along, ByRows(less, rows)])
    return dv if dim == 0 else transposed(dv)


_op = partial(op, flow={0: rows, 1: shared_by_rows, 2: shared_by_rows}, mixed_dims=last_dims)
_READ = ("input", "result1", "result2")

_op("NativeLayerNorm", rule=layer_norm, rowwise=Rowwise({1: _READ, 2: ()}, by_last_dims=True), shape_follows=True)
_op("FusedRmsNorm", rule=rms_norm)
op(
    "NativeGroupNorm",
    flow=convolutions.FLOW,
    rule=group_norm,
    rowwise=Rowwise({1: _READ, 2: _READ}, ("group",)),
    mixed_dims=group_dims,
)

_batch_norm = partial(op, flow={0: channels, 1: shared_by_channels, 2: shared_by_channels}, rule=batch_norm)
_batch_norm(
    "NativeBatchNorm NativeBatchNormLegit CudnnBatchNorm MiopenBatchNorm",
    averages_batch=lambda site: bool(site.value("training")),
)
_batch_norm("BatchNormWithUpdate", averages_batch=lambda site: True)
_batch_norm("NativeBatchNormLegitNoTraining BatchNormNoUpdate", averages_batch=lambda site: False)

_SAVED: dict[str, Callable[[Callable[[str], Any]], Any]] = {
    "v": lambda get: get("saved_v"),
    "g": lambda get: get("saved_g"),
    "result1": lambda get: get("saved_norms"),
}
op(
    "WeightNormInterface",
    pull=weight_norm,
    through=dict.fromkeys((0, 1), through_weight_norm),
    aten=(Aten("_weight_norm_interface_backward.default", ("grad_w",), None, saved=_SAVED),),
)
