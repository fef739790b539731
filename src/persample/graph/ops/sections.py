"""Parts of tensors: what is cut out, put together, repeated or padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...factors import Dense, Factor, View
from ...factors.rearrange import Section
from ...numberless import with_numbers
from ..layout import NOBODY, Flow, Labels, Layout, Outcome, Shape, labels, narrowed, same, sample_dims, simplify
from ..read.site import Site
from ..sample_rows import SampleRows
from .dims import but, follow, keep, only
from .table import EVERY, Aten, Layouts, Undecided, op
from .use import Use


def slice_of_dim(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Part of one dim: the rest of it belongs to nobody."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    dim = site.number("dim") % len(target)
    moved = follow(layout, shape, target, but(shape, dim))
    if moved is not None and sample_dims(layout, shape):
        return moved
    return _set_into(labels(layout, shape), target, dim, _slice(site, target[dim]), layout.batch)


def lift_slice(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """Zeros around it."""
    dim = site.number("dim") % len(target)
    where = _slice(site, target[dim])
    return View(factor, target, Section(target, dim, where.start, where.stop, where.step))


def _slice(site: Site, size: int) -> slice:
    """What was taken out of a dim of this size."""
    start, end = (None if site.value(name) is None else site.number(name) for name in ("start", "end"))
    return slice(*slice(start, end, site.number("step")).indices(size))


def place_in_dim(site: Site, k: int, layouts: Layouts) -> Outcome:
    """One place of one dim: the others belong to nobody."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    dim = site.number("dim") % len(target)
    moved = follow(layout, shape, target, [d + (d >= dim) for d in range(len(shape))], len(shape) + 1)
    if moved is not None and sample_dims(layout, shape):
        return moved
    place = site.number("index") % target[dim]
    return _set_into(labels(layout, shape).unsqueeze(dim), target, dim, slice(place, place + 1), layout.batch)


def lift_place(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """Zeros around it."""
    dim = site.number("dim") % len(target)
    place = site.number("index") % target[dim]
    return View(factor, target, Section(target, dim, place, place + 1, squeezed=True))


def _set_into(picked: Tensor, target: Shape, dim: int, where: slice, batch: int) -> Layout:
    """Labels of a whole dim from those of a part of it."""
    sizes = [target[dim] if d == dim else n for d, n in enumerate(picked.shape)]
    index = picked.new_full(sizes, NOBODY)
    index[(slice(None),) * dim + (where,)] = picked
    if len(range(target[dim])[where]) < target[dim]:  # something is nobody's: no block
        return Labels(batch, narrowed(index))
    return simplify(index, target, batch)


def pieces(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Put the pieces of one dim together again."""
    return _joined(site, k, layouts, unbound=False)


def places(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Put all places of one dim together again."""
    return _joined(site, k, layouts, unbound=True)


def _joined(site: Site, k: int, layouts: Layouts, unbound: bool) -> Outcome:
    target = site.target(k)
    dim = site.number("dim") % len(target)
    live = [(shape, layout) for shape, layout in zip(site.shapes, layouts, strict=True) if layout is not None]
    whole = _moved_alike(live, target, dim, unbound)
    if whole is not None:
        return whole
    parts = []
    for shape, layout in zip(site.shapes, layouts, strict=True):
        one = torch.full([1] * len(shape), NOBODY, device="cpu") if layout is None else labels(layout, shape)
        one = one.unsqueeze(dim) if unbound else one
        size = 1 if unbound else shape[dim]
        parts.append(one.expand([size if d == dim else n for d, n in enumerate(one.shape)]))
    sizes = torch.broadcast_shapes(*[[1 if d == dim else n for d, n in enumerate(p.shape)] for p in parts])
    parts = [p.expand([p.shape[dim] if d == dim else n for d, n in enumerate(sizes)]) for p in parts]
    return simplify(torch.cat(parts, dim), target, live[0][1].batch)


def _moved_alike(live: Sequence[tuple[Shape, Layout]], target: Shape, dim: int, unbound: bool) -> Layout | None:
    """Where the sample goes, if it goes to the same place from every piece."""
    to_dims = [d + (d >= dim) for d in range(len(target) - 1)] if unbound else but(target, dim)
    (shape, layout), *others = live
    moved = follow(layout, shape, target, to_dims, len(target)) if sample_dims(layout, shape) else None
    for other_shape, other in others:
        if moved is not None and not (other_shape == shape and same(other, layout)):
            varies = sample_dims(other, other_shape)
            other_moved = follow(other, other_shape, target, to_dims, len(target)) if varies else None
            moved = moved if other_moved is not None and same(other_moved, moved) else None
    return moved


def stacked(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Operand k is slice k of the new dim."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    dim = site.number("dim") % len(shape)
    to_dims = [None if d == dim else d - (d > dim) for d in range(len(shape))]
    moved = follow(layout, shape, target, to_dims, len(shape) - 1)
    if moved is not None:
        return moved
    index = labels(layout, shape)
    index = index.select(dim, k if index.shape[dim] > 1 else 0)
    return Labels(layout.batch, index) if index.numel() == 1 else simplify(index, target, layout.batch)


def concatenated(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Operand k is a section of one dim; which one is known by sizes when all operands are."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    if target == (0,):  # an empty operand may have any rank
        return None
    dim = site.number("dim") % len(shape)
    moved = follow(layout, shape, target, but(shape, dim))
    if moved is not None:
        return moved
    if any(slot is None for slot in site.edges[: k + 1]):
        raise Undecided
    start = sum(site.target(j)[dim] for j in range(k) if site.target(j) != (0,))
    return simplify(labels(layout, shape).narrow(dim, start, target[dim]), target, layout.batch)


def repeated(site: Site, k: int, layouts: Layouts) -> Outcome:
    """One row for all samples is shared; dims that are not repeated stay."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    repeats, offset = site.numbers("repeats"), len(shape) - len(target)
    dims = sample_dims(layout, shape)
    if dims and all(repeats[d] == shape[d] for d in dims):
        return Flow.SHARED
    to_dims = [d - offset if d >= offset and repeats[d] == 1 else None for d in range(len(shape))]
    return keep(layout, shape, target, to_dims, len(shape) - offset)


def repeat(use: Use) -> Factor | None:
    """(r0·n0, r1·n1, …) as (r0, n0, r1, n1, …), summed over the r's."""
    repeats = use.site.numbers("repeats")
    if not repeats or not use.g.numel():
        return None
    target = (1,) * (len(repeats) - len(use.target)) + use.target
    split = [n for pair in zip(repeats, target, strict=True) for n in pair]
    over = [2 * d for d in range(len(repeats))]
    order = [*over, *[d + 1 for d in over]]
    rows = use.g.reshape(split).permute(order).reshape(-1, *target)
    samples = _samples_of_rows(use, split, order, len(rows))
    return None if samples is None else Dense(samples.sum(rows).reshape(use.batch, *use.target))


@with_numbers
def _samples_of_rows(use: Use, split: Sequence[int], order: Sequence[int], count: int) -> SampleRows | None:
    """Whose the rows are, if every one of them is one sample's."""
    sample_index = labels(use.layout, tuple(use.g.shape)).expand(use.g.shape).reshape(split)
    by_row = sample_index.permute(*order).reshape(count, -1)
    if by_row.shape[1] and not torch.equal(by_row, by_row[:, :1].expand_as(by_row)):
        return None
    index = by_row[:, 0] if by_row.shape[1] else by_row.new_full((count,), NOBODY)
    return SampleRows.labelled(use.batch, index)


def padded(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Dims without padding stay."""
    shape, pad = site.shapes[0], site.numbers("pad")
    wider = [len(shape) - 1 - j for j in range(len(pad) // 2) if pad[2 * j] or pad[2 * j + 1]]
    return keep(only(layouts), shape, site.target(k), but(shape, *wider))


def _with_zeros(get: Callable[[str], Any]) -> bool:
    """Cotangents are padded as data are, if with zeros: what has no padding stays."""
    return bool(get("value") == 0)


def windows(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Windows along one dim, whose elements are in a new last dim."""
    shape, target = site.shapes[0], site.target(k)
    if not target:
        raise Undecided
    dim = site.number("dimension") % len(target)
    return keep(only(layouts), shape, target, but(shape, dim, len(shape) - 1), len(shape) - 1)


_section = partial(op, section=True, vmap=True)

_section(
    "Slice",
    flow=slice_of_dim,
    lift=lift_slice,
    shares_memory=True,
    aten=(Aten("slice_scatter.default", ("src",), zeros="self"),),
)
_section(
    "Select",
    flow=place_in_dim,
    lift=lift_place,
    shares_memory=True,
    aten=(Aten("select_scatter.default", ("src",), zeros="self"),),
)
_section("Split", flow=pieces, aten=(Aten("cat.default", ("tensors",)),))
_section("UnsafeSplit SplitWithSizes", flow=pieces)
op("UnsafeSplitWithSizes", section=True, flow=pieces)
_section("Unbind", flow=places)
op("Stack", flow={EVERY: stacked}, vmap=True)
op("Cat", flow={EVERY: concatenated}, vmap=True)
op("Repeat", flow=repeated, rule=repeat, vmap=True)
op("ConstantPadNd", flow=padded, vmap=True, aten=(Aten("constant_pad_nd.default", ("self",), where=_with_zeros),))
op("Unfold", flow=windows)
