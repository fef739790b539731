"""The batched engine: B cotangents at a time through what all samples share.

Factors keep their structure through views and casts; any other node is given stacks of B cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..distributed.wrappers import passed_from, passes_on
from ..factors import Dense, Factor, Outer, Rows, View
from ..factors.moves import AsComplex, Cast, Flip, Permute, Reshape, Roll, Section
from .fallback import loops, push_stacked
from .flows.shapes import slice_of
from .layout import Shape
from .registry import registrar
from .saved import is_custom
from .site import Site

Lift = Callable[[Site, Factor, Shape], Factor | None]

LIFTS: dict[str, Lift] = {}


lift = registrar(LIFTS, "lift")  # how factors pass through a node without being stacked


@lift("T")
def _transpose(site: Site, factor: Factor, target: Shape) -> Factor | None:
    if len(target) < 2:
        return factor
    return factor.t() if isinstance(factor, Outer) and len(factor.shape) == 2 else _moved(factor, target, (1, 0))


@lift("Transpose")
def _swap(site: Site, factor: Factor, target: Shape) -> Factor | None:
    n = len(target)
    if not n:
        return factor
    dims = list(range(n))
    a, b = site.number("dim0") % n, site.number("dim1") % n
    dims[a], dims[b] = b, a
    if isinstance(factor, Outer) and {a, b} == {n - 2, n - 1}:
        return factor.t()
    return _moved(factor, target, dims)


@lift("Permute")
def _permute(site: Site, factor: Factor, target: Shape) -> Factor | None:
    dims = site.dims("dims", len(target))
    return _moved(factor, target, [dims.index(d) for d in range(len(dims))])


def _moved(factor: Factor, target: Shape, dims: Sequence[int]) -> Factor:
    return View(factor, target, Permute(tuple(dims)))


@lift("View UnsafeView ReshapeAlias Squeeze Unsqueeze")
def _view(site: Site, factor: Factor, target: Shape) -> Factor | None:
    if isinstance(factor, Outer) and factor.shape == (1, *target) and factor.left.ndim == 4:
        return Outer(factor.left.squeeze(1), factor.right.squeeze(1), factor.scale)
    if factor.shape == target:
        return factor
    return View(factor, target, Reshape(factor.shape, target))


@lift("Clone Alias")
def _same(site: Site, factor: Factor, target: Shape) -> Factor | None:
    return factor


@lift("ToCopy")
def _cast(site: Site, factor: Factor, target: Shape) -> Factor | None:
    return View(factor, target, Cast(factor.dtype, site.metadata(0).dtype))


@lift("Slice")
def _slice(site: Site, factor: Factor, target: Shape) -> Factor | None:
    dim = site.number("dim") % len(target)
    where = slice_of(site, target[dim])
    return View(factor, target, Section(target, dim, where.start, where.stop, where.step))


@lift("Select")
def _select(site: Site, factor: Factor, target: Shape) -> Factor | None:
    dim = site.number("dim") % len(target)
    place = site.number("index") % target[dim]
    return View(factor, target, Section(target, dim, place, place + 1, squeezed=True))


@lift("Flip")
def _flip(site: Site, factor: Factor, target: Shape) -> Factor | None:
    return View(factor, target, Flip(tuple(site.dims("dims", len(target))) if target else ()))


@lift("Roll")
def _roll(site: Site, factor: Factor, target: Shape) -> Factor | None:
    if not target:
        return factor
    dims = tuple(saved % len(target) for saved in site.numbers("dims"))
    return View(factor, target, Roll(tuple(-n for n in site.numbers("shifts")), dims))


@lift("ViewAsReal")
def _complex(site: Site, factor: Factor, target: Shape) -> Factor | None:
    return View(factor, target, AsComplex(site.metadata(0).dtype))


@lift("Embedding IndexSelect")
def _table(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """A table read once for all samples: positions, relative distances."""
    if not target:
        return None
    if site.name == "IndexSelect":
        ids, padding = site.tensor("index"), -1
        plain = site.number("dim") % len(target) == 0
    else:
        ids, padding = site.tensor("indices"), site.number("padding_idx")
        plain = not site.value("scale_grad_by_freq")
    if not plain:
        return None
    flat = ids.reshape(-1)
    flat = flat.masked_fill(flat == padding, -1) if padding >= 0 else flat
    dy = factor.stack().reshape(factor.batch, len(flat), *target[1:])
    return Rows(flat.expand(factor.batch, -1), dy, target[0])


def lifted(site: Site, factor: Factor) -> Factor | None:
    """The factor of a node's one input without stacking, if the node is a view or a cast."""
    lift = LIFTS.get(site.name)
    if lift is None or len(site.shapes) != 1 or is_custom(site.node):
        return None
    return lift(site, factor, site.target(0))


def pull(site: Site, factors: Sequence[Factor | None], batch: int) -> tuple[dict[int, Factor], bool]:
    """The factors of a node's inputs from those of its outputs, and whether samples went through one at a time."""
    wanted = [k for k, _ in site.outputs]
    if passes_on(site.node):
        given = {k: factors[passed_from(site.node, k)] for k in wanted}
        return {k: factor for k, factor in given.items() if factor is not None}, False
    first = factors[0]
    if first is not None and wanted == [0]:
        found = lifted(site, first)
        if found is not None:
            return {0: found}, False
    stacks = [None if f is None else f.stack() for f in factors]
    if site.name == "WeightNormInterface" and stacks[0] is not None and len(stacks) == 1:
        return {k: factor for k, factor in _weight_norm(site, stacks[0]).items() if k in wanted}, False
    return {k: Dense(v) for k, v in push_stacked(site, stacks, batch, wanted).items()}, loops(site)


def _weight_norm(site: Site, dw: Tensor) -> dict[int, Factor]:
    """w = g v / ‖v‖, norms over all dims but one: dg = Σ dw v / ‖v‖ and dv = g / ‖v‖ (dw - v dg / ‖v‖)."""
    v, g, norm = site.tensor("v"), site.tensor("g"), site.tensor("result1")
    others = [d + 1 for d in range(v.ndim) if d != site.number("dim") % v.ndim]
    norm = norm.reshape([n if d + 1 not in others else 1 for d, n in enumerate(v.shape)])
    dg = ((dw * v).sum(others, keepdim=True)) / norm
    dv = g / norm * (dw - v * dg / norm)
    return {0: Dense(dv), 1: Dense(dg.reshape(len(dw), *g.shape))}
