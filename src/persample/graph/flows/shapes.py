"""Views, permutations and reductions: dims move, merge, split or come back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import NOBODY, Labels, Layout, Shape, carry, labels, reshape, same, sample_dims, simplify
from ..site import Fate, Flow, Site
from .registry import Layouts, flow, keep, only

# Ops that read part of a tensor: what they did not read is nobody's, even when all they read is one sample's.
SECTIONS = frozenset(
    "Slice Select Split UnsafeSplit SplitWithSizes UnsafeSplitWithSizes Unbind Index UnsafeIndex IndexSelect".split()
)


@flow("View UnsafeView ReshapeAlias Squeeze Unsqueeze ReshapeCopy MkldnnReshape")
def view(site: Site, k: int, layouts: Layouts) -> Fate:
    """The order of elements is the same, only the dims are counted otherwise."""
    return reshape(only(layouts), site.shapes[0], site.target(k))


@flow("T Transpose")
def transpose(site: Site, k: int, layouts: Layouts) -> Fate:
    """Two dims change places."""
    n = len(site.shapes[0])
    dims = list(range(n))
    if n >= 2:
        a, b = (site.number("dim0") % n, site.number("dim1") % n) if site.name == "Transpose" else (0, 1)
        dims[a], dims[b] = b, a
    return keep(only(layouts), site.shapes[0], site.target(k), dims)


@flow("Permute")
def permute(site: Site, k: int, layouts: Layouts) -> Fate:
    """Output dim d was input dim dims[d]."""
    return keep(only(layouts), site.shapes[0], site.target(k), site.dims("dims", len(site.shapes[0])))


@flow("ViewAsReal ViewAsComplex")
def view_as(site: Site, k: int, layouts: Layouts) -> Fate:
    """A last dim of two numbers appears or goes."""
    shape, target = site.shapes[0], site.target(k)
    n = min(len(shape), len(target))
    return keep(only(layouts), shape, target, [d if d < n else None for d in range(len(shape))])


@flow(
    "Sum Mean Nansum Prod Amax Amin Max Min Median Nanmedian Kthvalue Mode Logsumexp LinalgVectorNorm Norm Var Std"
    " VarMean StdMean Aminmax"
)
def reduction(site: Site, k: int, layouts: Layouts) -> Fate:
    """The reduced dims come back: every fibre along them belongs to the sample of its result."""
    live = [(shape, layout) for shape, layout in zip(site.shapes, layouts, strict=True) if layout is not None]
    target = site.target(k)
    fates = [_unreduce(site, layout, shape, target) for shape, layout in live]
    first = fates[0]
    alike = all(first is not None and fate is not None and same(first, fate) for fate in fates)
    return first if alike else Flow.PROBE


def _unreduce(site: Site, layout: Layout, shape: Shape, target: Shape) -> Layout | None:
    if len(shape) == len(target):
        return carry(layout, shape, target, range(len(shape)))
    reduced = site.dims("dim", len(target)) if site.has("dim") else range(len(target))
    return carry(layout, shape, target, [d for d in range(len(target)) if d not in reduced])


@flow("Slice")
def section(site: Site, k: int, layouts: Layouts) -> Fate:
    """Part of one dim: the rest of it belongs to nobody."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    dim = site.number("dim") % len(target)
    found = carry(layout, shape, target, [None if d == dim else d for d in range(len(shape))])
    if found is not None and sample_dims(layout, shape):
        return found
    return _set_into(labels(layout, shape), target, dim, slice_of(site, target[dim]), layout.batch)


@flow("Select")
def selection(site: Site, k: int, layouts: Layouts) -> Fate:
    """One place of one dim: the others belong to nobody."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    dim = site.number("dim") % len(target)
    found = carry(layout, shape, target, [d + (d >= dim) for d in range(len(shape))])
    if found is not None and sample_dims(layout, shape):
        return found
    place = site.number("index") % target[dim]
    return _set_into(labels(layout, shape).unsqueeze(dim), target, dim, slice(place, place + 1), layout.batch)


def slice_of(site: Site, size: int) -> slice:
    """What a Slice node took out of a dim of this size."""
    start, end = (None if site.value(name) is None else site.number(name) for name in ("start", "end"))
    return slice(*slice(start, end, site.number("step")).indices(size))


def _set_into(picked: Tensor, target: Shape, dim: int, where: slice, batch: int) -> Layout:
    """Labels of a whole dim from those of a part of it."""
    sizes = [target[dim] if d == dim else n for d, n in enumerate(picked.shape)]
    index = picked.new_full(sizes, NOBODY)
    index[(slice(None),) * dim + (where,)] = picked
    return simplify(index, target, batch)


@flow("Split UnsafeSplit SplitWithSizes UnsafeSplitWithSizes Unbind")
def pieces(site: Site, k: int, layouts: Layouts) -> Fate:
    """Put the pieces of one dim together again."""
    target = site.target(k)
    dim = site.number("dim") % len(target)
    unbind = site.name == "Unbind"
    live = [(s, lay) for s, lay in zip(site.shapes, layouts, strict=True) if lay is not None]
    to_dims = [d + (unbind and d >= dim) if d != dim or unbind else None for d in range(len(site.shapes[0]))]
    whole = _moved_alike(live, target, to_dims)
    if whole is not None:
        return whole
    parts = []
    for piece, its in zip(site.shapes, layouts, strict=True):
        one = torch.full([1] * len(piece), NOBODY, device="cpu") if its is None else labels(its, piece)
        one = one.unsqueeze(dim) if unbind else one
        size = 1 if unbind else piece[dim]
        parts.append(one.expand([size if d == dim else n for d, n in enumerate(one.shape)]))
    sizes = torch.broadcast_shapes(*[[1 if d == dim else n for d, n in enumerate(p.shape)] for p in parts])
    parts = [p.expand([p.shape[dim] if d == dim else n for d, n in enumerate(sizes)]) for p in parts]
    return simplify(torch.cat(parts, dim), target, live[0][1].batch)


def _moved_alike(live: Sequence[tuple[Shape, Layout]], target: Shape, to_dims: Sequence[int | None]) -> Layout | None:
    """Where the sample goes, if it goes to the same place from every piece."""
    (shape, layout), *others = live
    found = carry(layout, shape, target, to_dims) if sample_dims(layout, shape) else None
    for other_shape, other in others:
        if found is not None and not (other_shape == shape and same(other, layout)):
            moved = carry(other, other_shape, target, to_dims) if sample_dims(other, other_shape) else None
            found = found if moved is not None and same(moved, found) else None
    return found


@flow("Stack")
def stacked(site: Site, k: int, layouts: Layouts) -> Fate:
    """Operand k is slice k of the new dim."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    dim = site.number("dim") % len(shape)
    found = carry(layout, shape, target, [None if d == dim else d - (d > dim) for d in range(len(shape))])
    if found is not None:
        return found
    index = labels(layout, shape)
    index = index.select(dim, k if index.shape[dim] > 1 else 0)
    return Labels(layout.batch, index) if index.numel() == 1 else simplify(index, target, layout.batch)


@flow("Cat")
def concatenated(site: Site, k: int, layouts: Layouts) -> Fate:
    """Operand k is a section of one dim; which one is known by sizes when all operands are."""
    layout, shape = only(layouts), site.shapes[0]
    if site.target(k) == (0,):  # an empty operand may have any rank
        return None
    dim = site.number("dim") % len(shape)
    found = carry(layout, shape, site.target(k), [None if d == dim else d for d in range(len(shape))])
    if found is not None:
        return found
    if any(slot is None for slot in site.edges[: k + 1]):
        return Flow.PROBE
    start = sum(site.target(j)[dim] for j in range(k) if site.target(j) != (0,))
    return simplify(labels(layout, shape).narrow(dim, start, site.target(k)[dim]), site.target(k), layout.batch)


@flow("Repeat Flip Roll ConstantPadNd Unfold")
def rearranged(site: Site, k: int, layouts: Layouts) -> Fate:
    """One or more dims are rearranged or resized; the others are left alone."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    n = len(shape)
    if site.name in ("Flip", "Roll"):
        moved = site.dims("dims", n)
        return keep(layout, shape, target, [None if d in moved else d for d in range(n)])
    if site.name == "Unfold":
        moved = (site.number("dimension") % len(target),)
        return keep(layout, shape, target, [None if d in moved or d == n - 1 else d for d in range(n)])
    if site.name == "ConstantPadNd":
        pad = site.numbers("pad")
        padded = [n - 1 - j for j in range(len(pad) // 2) if pad[2 * j] or pad[2 * j + 1]]
        return keep(layout, shape, target, [None if d in padded else d for d in range(n)])
    if site.name == "Repeat":
        repeats, offset = site.numbers("repeats"), n - len(target)
        dims = sample_dims(layout, shape)
        if dims and all(repeats[d] == shape[d] for d in dims):  # one row for all samples
            return Flow.SHARED
        return keep(layout, shape, target, [d - offset if d >= offset and repeats[d] == 1 else None for d in range(n)])
    return Flow.PROBE
