"""Distances between rows: tables of centres, codebooks, prototypes."""

from __future__ import annotations

from math import prod

from torch import Tensor

from ...factors import Factor
from ...kernels.library import distance_gradient
from .dims import by_letters
from .table import op
from .use import Use


def _gradients(use: Use, g: Tensor, x: Tensor, distances: Tensor) -> Tensor:
    """From cotangents, data and distances (B, T, ·) of samples, those of the table."""
    table = use.site.tensor("x2").flatten(0, -2).expand(len(g), -1, -1)
    return distance_gradient(g.mT, table, x, use.site.value("p"), distances.mT).reshape(len(g), *use.target)


def cdist(use: Use) -> Factor | None:
    """Distances to the rows of a table: PyTorch's own backward, with a batch of samples."""
    site, rows, width = use.site, use.rows(use.g.ndim - 1), use.target[-1]
    if use.k != 1 or rows is None or prod(use.target[:-2]) != 1:
        return None
    x = site.tensor("x1").expand(*use.g.shape[:-1], width)
    sides = [t.flatten(0, -2) for t in (use.g, x, site.tensor("result"))]
    return rows.written_out(sides, lambda grouped: _gradients(use, *grouped))


op("Cdist", flow=by_letters("...nm", {0: "...nd", 1: "...md"}), rule=cdist)  # wrong numbers under vmap
op("EuclideanDist", vmap=True)
