"""Ops that mix elements along some dims (softmax, sorts, reductions, Fourier transforms) and leave others alone."""

from __future__ import annotations

from functools import partial

from ...factors import ByRows, Factor
from ..layout import Flow, Layout, Outcome, Shape, same
from ..read.site import Site
from .dims import but, follow, keep, of_same_size, only
from .table import Aten, Layouts, Undecided, op


def along_dim(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Fibres along one dim."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    if not shape or len(shape) != len(target):
        raise Undecided
    return keep(layout, shape, target, of_same_size(shape, target, but(shape, *site.dims("dim", len(shape)))))


def fourier(site: Site, k: int, layouts: Layouts) -> Outcome:
    """The transformed dims are mixed."""
    shape = site.shapes[0]
    return keep(only(layouts), shape, site.target(k), but(shape, *site.dims("dim", len(shape))))


def reduction(site: Site, k: int, layouts: Layouts) -> Outcome:
    """The reduced dims come back: every fibre along them belongs to the sample of its result."""
    live = [(shape, layout) for shape, layout in zip(site.shapes, layouts, strict=True) if layout is not None]
    target = site.target(k)
    outcomes = [_unreduced(site, layout, shape, target) for shape, layout in live]
    first = outcomes[0]
    alike = all(first is not None and outcome is not None and same(first, outcome) for outcome in outcomes)
    return first if alike else Flow.PROBE


def _unreduced(site: Site, layout: Layout, shape: Shape, target: Shape) -> Layout | None:
    if len(shape) == len(target):  # the reduced dims were kept, with one element
        return follow(layout, shape, target, of_same_size(shape, target, range(len(shape))))
    reduced = site.dims("dim", len(target)) if site.has("dim") else range(len(target))
    return follow(layout, shape, target, [d for d in range(len(target)) if d not in reduced], len(target))


def through_norms_of_rows(site: Site, k: int, factor: Factor) -> Factor | None:
    """Euclidean norms over all dims but the first: every row of the tensor, over its norm, times the cotangent."""
    t, norm = site.tensor("self"), site.tensor("result")
    rows = site.dims("dim", t.ndim) == tuple(range(1, t.ndim)) and t.ndim > 1
    if not rows or site.value("ord") != 2 or t.is_complex() or factor.dtype != t.dtype:
        return None
    norm = norm.reshape(-1, *[1] * (t.ndim - 1))
    unit = (t / norm.masked_fill(norm == 0, 1)).masked_fill(norm == 0, 0)
    return ByRows(factor.stack().flatten(1), unit)


_along = partial(op, flow=along_dim)

_along("Softmax LogSoftmax", vmap=True, shape_follows=True)
_along("Cumsum", vmap=True, aten=(Aten("cumsum.default", ("self",)),))
_along("SafeSoftmax Cumprod Logcumsumexp Glu", vmap=True)
_along("Cummax Cummin")
_along(
    "Sort",
    vmap=True,
    ranks=True,
    aten=(Aten("scatter.src", ("src",), zeros="self", where=lambda get: get("src").shape == get("index").shape),),
)
_along("Topk", vmap=True, ranks=True)
op("FftR2C FftC2R FftC2C", flow=fourier, vmap=True)
op(
    "Sum Mean Nansum Prod Amax Amin Max Min Median Nanmedian Kthvalue Mode Logsumexp Norm Var Std VarMean StdMean"
    " Aminmax",
    flow=reduction,
    vmap=True,
)
op("LinalgVectorNorm", flow=reduction, vmap=True, through={0: through_norms_of_rows})
op("Renorm", vmap=True)
