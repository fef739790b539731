"""Losses by class: one number for every row of scores."""

from __future__ import annotations

from ..layout import Outcome
from ..read.site import Site
from .dims import keep, only
from .table import Layouts, op


def by_class(site: Site, k: int, layouts: Layouts) -> Outcome:
    """(N, ...) came from (N, C, ...)."""
    shape = site.shapes[0]
    return keep(only(layouts), shape, site.target(k), [d + (d > 0) for d in range(len(shape))], len(shape) + 1)


def ctc(site: Site, k: int, layouts: Layouts) -> Outcome:
    """(N,) came from (T, N, C)."""
    return keep(only(layouts), site.shapes[0], site.target(k), [1], 3)


op("NllLoss NllLoss2D MultiMarginLoss MultilabelMarginLoss", flow=by_class)
op("CtcLoss CudnnCtcLoss", flow=ctc)
