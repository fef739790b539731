"""Reads by index: dims that are not indexed carry the sample over; along an indexed one, the indices tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import NOBODY, Layout, Shape, carry, labels, sample_dims, simplify
from ..site import Fate, Flow, Site
from .registry import Layouts, flow, only


def scatter_labels(
    layout: Layout, shape: Shape, target: Shape, block: range, indices: Sequence[Tensor], first: int
) -> Fate:
    """The samples of a table that was read at ``indices``: dims ``block`` of the result came from dims ``first``…

    Each place of the table gets the sample of whoever read it; two readers of different samples meet there.
    """
    if any(d not in block for d in sample_dims(layout, shape)):
        return Flow.PROBE
    read = labels(layout, shape)
    read = read.reshape([read.shape[d] for d in block]).expand([shape[d] for d in block])
    sizes = target[first : first + len(indices)]
    table = read.new_full(sizes, NOBODY)
    where = tuple(torch.broadcast_tensors(*[i.to("cpu") for i in indices]))
    table[where] = read
    live = read != NOBODY
    if bool((table[where] != read)[live].any()):
        return Flow.MIXED
    index = table.reshape([1] * first + list(sizes) + [1] * (len(target) - first - len(indices)))
    return simplify(index, target, layout.batch)


@flow("Index UnsafeIndex")
def index(site: Site, k: int, layouts: Layouts) -> Fate:
    """``x[:, i, j]`` and its like."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    indices = list(site.value("indices"))
    indexed = [d for d, i in enumerate(indices) if i is not None]
    tensors = [i for i in indices if i is not None]
    if not indexed or any(i.dtype in (torch.bool, torch.uint8) for i in tensors):
        return Flow.PROBE
    width = max(i.ndim for i in tensors)
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    start = indexed[0] if adjacent else 0
    block = range(start, start + width)
    kept = [d for d in range(len(target)) if d not in indexed]
    to_dims: list[int | None] = []
    for d in range(len(shape)):
        to_dims.append(None if d in block else kept[d if d < start else d - width])
    found = carry(layout, shape, target, to_dims)
    if found is not None and sample_dims(layout, shape):
        return found
    if site.is_weight(k):
        return Flow.SHARED
    return scatter_labels(layout, shape, target, block, tensors, start) if adjacent else Flow.PROBE


@flow("IndexSelect")
def index_select(site: Site, k: int, layouts: Layouts) -> Fate:
    """Rows of one dim."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    dim = site.number("dim") % max(len(shape), 1)
    found = carry(layout, shape, target, [None if d == dim else d for d in range(len(shape))])
    if found is not None and sample_dims(layout, shape):
        return found
    if site.is_weight(k):
        return Flow.SHARED
    return scatter_labels(layout, shape, target, range(dim, dim + 1), [site.tensor("index")], dim)


@flow("Embedding")
def embedding(site: Site, k: int, layouts: Layouts) -> Fate:
    """A table read by row."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    found = carry(layout, shape, target, [None] * (len(shape) - 1) + [1])
    if found is not None:
        return found
    if site.is_weight(k):
        return Flow.SHARED
    return scatter_labels(layout, shape, target, range(len(shape) - 1), [site.tensor("indices")], 0)


@flow("EmbeddingBag")
def embedding_bag(site: Site, k: int, layouts: Layouts) -> Fate:
    """A table read by row, several rows per result."""
    return Flow.SHARED if k == 0 and site.is_weight(k) else Flow.PROBE


@flow("IndexAdd IndexCopy")
def index_add(site: Site, k: int, layouts: Layouts) -> Fate:
    """Rows of the source go to places of one dim; the base keeps its own layout."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    if k == 0 or not shape:
        return layout if shape == target else Flow.PROBE
    dim = site.number("dim") % len(shape)
    found = carry(layout, shape, target, [None if d == dim else d for d in range(len(shape))])
    if found is not None:
        return found
    read = labels(layout, shape)
    picked = read.index_select(dim, site.tensor("index").to("cpu").reshape(-1)) if read.shape[dim] > 1 else read
    return simplify(picked, target, layout.batch)
