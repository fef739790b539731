"""Views and copies of a whole tensor: dims move, merge or split."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...factors import Factor, Outer, View
from ...factors.rearrange import AsComplex, Flip, Permute, Reshape, Roll
from ..layout import Outcome, Shape, reshape
from ..read.site import Site
from .dims import but, keep, only
from .table import Aten, Layouts, op


def same_order(site: Site, k: int, layouts: Layouts) -> Outcome:
    """The order of elements is the same, only the dims are counted otherwise."""
    return reshape(only(layouts), site.shapes[0], site.target(k))


def lift_view(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """The dims are counted otherwise; of outer products, one product in front goes."""
    if isinstance(factor, Outer) and factor.shape == (1, *target) and factor.left.ndim == 4:
        return Outer(factor.left.squeeze(1), factor.right.squeeze(1), factor.scale)
    if factor.shape == target:
        return factor
    return View(factor, target, Reshape(factor.shape, target))


def transposed(site: Site, k: int, layouts: Layouts) -> Outcome:
    """The two dims of a matrix change places."""
    shape = site.shapes[0]
    return keep(only(layouts), shape, site.target(k), range(len(shape))[::-1])


def lift_transposed(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """Outer products change their sides."""
    if len(target) < 2:
        return factor
    return factor.t() if isinstance(factor, Outer) and len(factor.shape) == 2 else _moved(factor, target, (1, 0))


def _swap(site: Site, ndim: int) -> list[int]:
    """All dims, of which two have changed places."""
    dims = list(range(ndim))
    if ndim:
        a, b = site.number("dim0") % ndim, site.number("dim1") % ndim
        dims[a], dims[b] = b, a
    return dims


def swapped(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Two dims change places."""
    shape = site.shapes[0]
    return keep(only(layouts), shape, site.target(k), _swap(site, len(shape)))


def lift_swapped(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """Outer products change their sides, if the last two dims do."""
    dims = _swap(site, len(target))
    if not dims:
        return factor
    last = [*range(len(dims) - 2), len(dims) - 1, len(dims) - 2]
    return factor.t() if isinstance(factor, Outer) and dims == last else _moved(factor, target, dims)


def permuted(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Output dim d was input dim dims[d]."""
    shape = site.shapes[0]
    return keep(only(layouts), shape, site.target(k), site.dims("dims", len(shape)))


def lift_permuted(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """The inverse permutation."""
    dims = site.dims("dims", len(target))
    return _moved(factor, target, [dims.index(d) for d in range(len(dims))])


def _moved(factor: Factor, target: Shape, dims: Sequence[int]) -> Factor:
    return View(factor, target, Permute(tuple(dims)))


def _inverse(dims: Sequence[int]) -> list[int]:
    order = [d % len(dims) for d in dims]
    return [order.index(d) for d in range(len(order))]


def real_and_imaginary(site: Site, k: int, layouts: Layouts) -> Outcome:
    """A last dim of two numbers has come."""
    shape = site.shapes[0]
    return keep(only(layouts), shape, site.target(k), but(shape, len(shape) - 1), len(shape) - 1)


def lift_real_and_imaginary(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """Two numbers are one again."""
    return View(factor, target, AsComplex(site.metadata(0).dtype))


def complex_numbers(site: Site, k: int, layouts: Layouts) -> Outcome:
    """A last dim of two numbers has gone."""
    shape = site.shapes[0]
    return keep(only(layouts), shape, site.target(k), range(len(shape)), len(shape) + 1)


def rearranged(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Elements change places along some dims; the others are left alone."""
    shape = site.shapes[0]
    return keep(only(layouts), shape, site.target(k), but(shape, *site.dims("dims", len(shape))))


def lift_flipped(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """Flipped back."""
    return View(factor, target, Flip(tuple(site.dims("dims", len(target))) if target else ()))


def lift_rolled(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """Rolled back."""
    if not target:
        return factor
    dims = tuple(saved % len(target) for saved in site.numbers("dims"))
    return View(factor, target, Roll(tuple(-n for n in site.numbers("shifts")), dims))


_view = partial(op, view=True, vmap=True)

_RESHAPES = ("view.default", "reshape.default", "_unsafe_view.default", "unsqueeze.default")
_SQUEEZES = ("squeeze.default", "squeeze.dim", "squeeze.dims")
_reshape = partial(_view, flow=same_order, by_shape=True, lift=lift_view)

_reshape("View", aten=tuple(Aten(name, ("self",)) for name in (*_RESHAPES, *_SQUEEZES)))
_reshape("UnsafeView ReshapeAlias Squeeze Unsqueeze")
_view("T", flow=transposed, by_shape=True, lift=lift_transposed, shape_follows=True, has_options=False)
_view("Transpose", flow=swapped, lift=lift_swapped)
_view(
    "Permute",
    flow=permuted,
    lift=lift_permuted,
    aten=(Aten("permute.default", ("self",), saved={"dims": lambda get: _inverse(get("dims"))}),),
)
op("ReshapeCopy MkldnnReshape", flow=same_order)
op("ViewAsReal", flow=real_and_imaginary, lift=lift_real_and_imaginary)
op("ViewAsComplex", flow=complex_numbers, vmap=True)
op(
    "Flip",
    flow=rearranged,
    lift=lift_flipped,
    aten=(Aten("flip.default", ("self",)), Aten("prims.rev.default", ("a",))),
)
op("Roll", flow=rearranged, lift=lift_rolled)
op("Diagonal DiagEmbed Trace", vmap=True)
op("AsStrided", in_place=True)
