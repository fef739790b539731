"""Copies into a part of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import Layout, Outcome, Shape, labels, simplify
from ..read.site import Site
from ..read.slices import Copied, copied
from .dims import only, unbroadcast
from .table import Layouts, Undecided, op


def overwritten(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Elements that were not overwritten are where they were; the gradient of the others is zero."""
    layout, target = only(layouts), site.target(k)
    if _copied(site) is None or site.shapes[0] != target:
        raise Undecided
    return layout


def written(site: Site, k: int, layouts: Layouts) -> Outcome:
    """What was copied into a part of a tensor has the samples of that part."""
    layout, shape, place = only(layouts), site.shapes[0], _copied(site)
    index = None if place is None else _labels_of_part(layout, shape, place)
    if index is None or place is None:
        raise Undecided
    return unbroadcast(simplify(index, place.size, layout.batch), place.size, site.target(k))


def _copied(site: Site) -> Copied | None:
    """What was copied where, which both operands ask for."""
    if "copied" not in site.memo:
        site.memo["copied"] = copied(site.node)
    found: Copied | None = site.memo["copied"]
    return found


def _labels_of_part(layout: Layout, shape: Shape, place: Copied) -> Tensor | None:
    """The sample of every element of a part, as a tensor that broadcasts to it; None if the whole has gaps."""
    if not _is_dense(shape, place.strides):
        return None
    index = labels(layout, shape)
    varying = [d for d, n in enumerate(index.shape) if n != 1]
    at = torch.full([1] * len(place.size), place.offset, device="cpu")
    least = min([place.strides[d] for d in varying], default=place.offset + 1)
    short = [j for j, step in enumerate(place.stride) if step < least]
    stays = place.offset % least + sum([(place.size[j] - 1) * place.stride[j] for j in short]) < least
    for j, (n, step) in enumerate(zip(place.size, place.stride, strict=True)):
        if varying and not (stays and j in short):  # else the sample does not change along it
            along = torch.arange(n, device="cpu") * step
            at = at + along.reshape([-1 if e == j else 1 for e in range(len(place.size))])
    places = [at // place.strides[d] % shape[d] if d in varying else torch.zeros_like(at) for d in range(len(shape))]
    return index[tuple(places)] if places else index.reshape(at.shape)


def _is_dense(shape: Shape, steps: Shape) -> bool:
    """Are the elements of a tensor with these strides one after another in memory, in whatever order of its dims?"""
    size = 1
    for step, n in sorted([(step, n) for step, n in zip(steps, shape, strict=True) if n != 1]):
        if step != size:
            return False
        size *= n
    return True


op("CopySlices", flow={0: overwritten, 1: written}, in_place=True, new_rows=lambda node, shape: range(len(shape)))
