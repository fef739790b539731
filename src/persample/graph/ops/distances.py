"""Distances between rows: tables of centres, codebooks, prototypes."""

from __future__ import annotations

from ...factors import Dense, Factor
from ...kernels.library import distance_gradient
from ..use import Use
from .dims import by_letters
from .table import op


def cdist(use: Use) -> Factor | None:
    """A table (m, d) that all samples measure from: PyTorch's own backward, with the samples as its batch."""
    site, rows = use.site, use.lanes(use.g.ndim - 1)
    if use.k != 1 or rows is None or len(use.target) != 2:
        return None
    x = site.tensor("x1").expand(*use.g.shape[:-1], -1)
    g, x, distances = (rows.group(t.flatten(0, -2)) for t in (use.g, x, site.tensor("result")))
    table = site.tensor("x2").expand(use.batch, -1, -1)
    return Dense(distance_gradient(g.mT, table, x, site.value("p"), distances.mT))


op("Cdist", flow=by_letters("*nm", {0: "*nd", 1: "*md"}), rule=cdist)  # wrong numbers under vmap
op("EuclideanDist", vmap=True)
