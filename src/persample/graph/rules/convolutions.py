"""Convolutions: weight and bias."""

from __future__ import annotations

from ...factors import Convolution, Dense, Factor
from ...kernels.convolution import Geometry
from .registry import Use, rule


@rule("Convolution")
def convolution(use: Use) -> Factor | None:
    """Images (dim 0) grouped by sample; the weight's gradient stays a pair of inputs and cotangents."""
    site, g = use.site, use.g
    lanes = use.lanes(1)
    if lanes is None or g.is_complex():
        return None
    if use.k == 2:
        return Dense(lanes.sum(g.sum(tuple(range(2, g.ndim)))))
    geometry = Geometry(
        stride=_per_dim(use, "stride"),
        padding=_per_dim(use, "padding"),
        dilation=_per_dim(use, "dilation"),
        transposed=bool(site.value("transposed")),
        output_padding=_per_dim(use, "output_padding"),
        groups=site.number("groups"),
    )
    x = site.tensor("input")
    if use.k != 1 or x.dtype != g.dtype:
        return None
    return Convolution(lanes.group(x), lanes.group(g), use.target, geometry)


def _per_dim(use: Use, name: str) -> tuple[int, ...]:
    """One number per spatial dim; a single saved one (padding="valid" does that) stands for all."""
    found = use.site.numbers(name)
    return found * (use.g.ndim - 2) if len(found) == 1 else found
