"""Distances between rows: tables of centres, codebooks, prototypes."""

from __future__ import annotations

from math import prod

from ...factors import Dense, Factor
from ...kernels.library import distance_gradient
from .dims import by_letters
from .table import op
from .use import Use


def cdist(use: Use) -> Factor | None:
    """Distances to the rows of a table: PyTorch's own backward, with a batch of samples."""
    site, rows, width = use.site, use.rows(use.g.ndim - 1), use.target[-1]
    if use.k != 1 or rows is None or prod(use.target[:-2]) != 1:
        return None
    x = site.tensor("x1").expand(*use.g.shape[:-1], width)
    table = site.tensor("x2").flatten(0, -2).expand(use.batch, -1, -1)
    g, x, distances = (rows.group(t.flatten(0, -2)) for t in (use.g, x, site.tensor("result")))
    return Dense(distance_gradient(g.mT, table, x, site.value("p"), distances.mT).reshape(use.batch, *use.target))


op("Cdist", flow=by_letters("...nm", {0: "...nd", 1: "...md"}), rule=cdist)  # wrong numbers under vmap
op("EuclideanDist", vmap=True)
