"""The definition, one node at a time: the node itself, called on each sample's cotangents alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from persample.graph.layout import Layout
from persample.graph.read.invoke import call_each, sum_to
from persample.graph.read.site import Site
from tests.forms import plain
from tests.graph.matrix.places import marks
from tests.graph.sites import wanted

_DIGITS = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def by_sample(
    site: Site, cotangents: Sequence[Tensor | None], layouts: Sequence[Layout | None]
) -> dict[int, Tensor] | None:
    """(B, *target) for every output that leads somewhere, summed over broadcast dims as the engine does.

    None where PyTorch cannot: some backwards do not know half precision, or operands that the forward takes.
    """
    batch = next(layout.batch for layout in layouts if layout is not None)
    rows: list[list[Tensor | None]] = [[] for _ in range(batch)]
    for g, layout, shape in zip(cotangents, layouts, site.shapes, strict=True):
        mine = None if g is None or layout is None else _masked(plain(g), marks(layout, shape))
        for i, row in enumerate(rows):
            row.append(None if mine is None else mine[i])
    return by_row(site, rows)


def by_row(site: Site, rows: Sequence[Sequence[Tensor | None]]) -> dict[int, Tensor] | None:
    """The same for any cotangents, one row of them after another."""
    try:
        found = call_each(site.node, rows, site.edges, list)
        return {k: torch.stack([_finished(site, k, outputs[k]) for outputs in found]) for k in wanted(site)}
    except RuntimeError:
        return None


def _masked(g: Tensor, mine: Tensor) -> Tensor:
    return torch.where(mine, g, torch.zeros((), dtype=g.dtype))


def _finished(site: Site, k: int, value: Tensor | None) -> Tensor:
    about = site.metadata(k)
    if value is None:
        return torch.zeros(site.target(k), dtype=about.dtype)
    return sum_to(value, site.target(k), about.dtype)


def differs(got: Tensor, want: Tensor, scale: float, *through: torch.dtype) -> str | None:
    """What is wrong, up to the rounding of the least precise of the dtypes that numbers went ``through``."""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not want.numel():
        return None
    digits = max(_DIGITS[dtype.to_real()] for dtype in (got.dtype, want.dtype, *through))
    wide = torch.complex128 if want.is_complex() or got.is_complex() else torch.float64
    got, want = got.to(wide), want.to(wide)
    largest = float(torch.nan_to_num((got - want).abs(), nan=torch.inf).max())
    return f"off by {largest:.3g} where sizes are {scale:.3g}" if largest > digits * scale else None


def size(*tensors: Tensor | None) -> float:
    """The largest finite number of them, or one."""
    found = [float(torch.nan_to_num(t.detach().abs(), 0, 0, 0).max()) for t in tensors if t is not None and t.numel()]
    return max([1.0, *found])
