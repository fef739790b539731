"""Writes by index: a source goes to places of a base, which keeps the others."""

from __future__ import annotations

from ...numberless import read_numbers
from ..layout import Outcome, labels, simplify
from ..read.site import Site
from .along_dims import along_dim
from .dims import but, follow, only
from .table import Layouts, Undecided, op


def base(site: Site, k: int, layouts: Layouts) -> Outcome:
    """The base has the result's shape, and keeps its own layout."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    if shape != target:
        raise Undecided
    return layout


def source(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Rows of the source go to places of one dim."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    if not shape:
        return base(site, k, layouts)
    dim = site.number("dim") % len(shape)
    moved = follow(layout, shape, target, but(shape, dim))
    if moved is not None:
        return moved
    read = labels(layout, shape)
    picked = (
        read.index_select(dim, read_numbers(site.tensor("index")).to("cpu").reshape(-1))
        if read.shape[dim] > 1
        else read
    )
    return simplify(picked, target, layout.batch)


def reduced_source(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Fibres along one dim; of a source larger than its index, PyTorch repeats gradients."""
    if tuple(site.tensor("index").shape) != site.target(k):
        raise Undecided
    return along_dim(site, k, layouts)


op("IndexAdd IndexCopy", flow={0: base, 1: source}, vmap=True)
op("IndexFill IndexPut", vmap=True)
op("Scatter ScatterAdd", flow={0: along_dim, 1: along_dim}, vmap=True)
op("ScatterReduce", flow={0: along_dim, 1: reduced_source})
