"""Tables read by row or by element: embeddings, bags of embeddings, indexed and gathered parameters.

Dims that are not indexed carry the sample over; along an indexed one, the indices tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ...factors import Factor, Rows, View
from ...factors.rearrange import Reshape
from ...kernels.norms import wide
from ...kernels.rows import rows_summed
from ...numberless import read_numbers, with_numbers
from ..layout import NOBODY, Flow, Layout, Outcome, Shape, labels, sample_dims, simplify, strides
from ..read import saved
from ..read.site import Site
from ..sample_rows import SampleRows
from .along_dims import along_dim
from .dims import but, follow, only
from .table import Aten, Layouts, Undecided, op
from .use import Use

# --- what all of them share ---


def _written_back(
    layout: Layout, shape: Shape, target: Shape, block: range, indices: Sequence[Tensor], first: int
) -> Outcome:
    """The samples of a table that was read at ``indices``: dims ``block`` of the result came from dims ``first``…

    Each place of the table gets the sample of whoever read it; two readers of different samples meet there.
    """
    if any(d not in block for d in sample_dims(layout, shape)):
        return Flow.PROBE
    read = labels(layout, shape)
    read = read.reshape([read.shape[d] for d in block]).expand([shape[d] for d in block])
    sizes = target[first : first + len(indices)]
    table = read.new_full(sizes, NOBODY)
    where = tuple(torch.broadcast_tensors(*[read_numbers(i).to("cpu") for i in indices]))
    table[where] = read
    live = read != NOBODY
    if bool((table[where] != read)[live].any()):
        return Flow.MIXED
    index = table.reshape([1] * first + list(sizes) + [1] * (len(target) - first - len(indices)))
    return simplify(index, target, layout.batch)


def _rows(use: Use, samples: SampleRows, ids: Tensor, dy: Tensor, parts: int, *, skips: bool = False) -> Factor:
    """Flat ids (N,) into the first ``parts`` dims of the table, and their cotangents (N, ...).

    If it ``skips``, an id may be -1.
    """
    target, ragged = use.target, samples.is_ragged  # which are padded with zeros, to become -1

    def read(grouped: list[Tensor]) -> Factor:
        own = grouped[0] - 1 if ragged else grouped[0]
        factor = Rows(own, grouped[1], prod(target[:parts]), skips=skips or ragged)
        return factor if factor.shape == target else View(factor, target, Reshape(factor.shape, target))

    return samples.factor([ids + 1 if ragged else ids, dy.reshape(len(ids), *target[parts:])], read)


def _read_once(factor: Factor, target: Shape, ids: Tensor, *, skips: bool = False) -> Factor:
    """The factor of a table that is read once for all samples (positions, relative distances)."""
    flat = ids.reshape(-1)
    dy = factor.stack().reshape(factor.batch, len(flat), *target[1:])
    return Rows(flat.expand(factor.batch, -1), dy, target[0], skips=skips)


def _without_padding(site: Site) -> Tensor:
    """The ids of an embedding, -1 for those that get no gradient."""
    ids, padding = site.tensor("indices"), site.number("padding_idx")
    return ids.masked_fill(ids == padding, -1) if padding >= 0 else ids


def _all_dims(node: Node, shape: Shape) -> Sequence[int]:
    return range(len(shape))


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


# --- embeddings ---


def embedding_flow(site: Site, k: int, layouts: Layouts) -> Outcome:
    """A table read by row."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    moved = follow(layout, shape, target, [None] * (len(shape) - 1) + [1], 2)
    if moved is not None:
        return moved
    if site.is_weight(k):
        return Flow.SHARED
    return _written_back(layout, shape, target, range(len(shape) - 1), [site.tensor("indices")], 0)


def embedding(use: Use) -> Factor | None:
    """Rows ids of the table; the row padding_idx gets nothing, and frequent ids may count less."""
    site, ids = use.site, use.site.tensor("indices")
    samples = use.rows(ids.ndim)
    if samples is None:
        return None
    flat, dy = ids.reshape(-1), use.g.reshape(ids.numel(), use.target[1])
    if site.value("scale_grad_by_freq"):
        counts = flat.new_zeros(use.target[0]).index_add_(0, flat, torch.ones_like(flat))
        dy = dy / counts[flat].unsqueeze(1)
    return _rows(use, samples, _without_padding(site).reshape(-1), dy, 1, skips=site.number("padding_idx") >= 0)


def lift_embedding(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """A table read once for all samples."""
    if site.value("scale_grad_by_freq"):
        return None
    return _read_once(factor, target, _without_padding(site), skips=site.number("padding_idx") >= 0)


def _dims_of_ids(site: Site) -> list[int] | None:
    shape = site.shapes[0]
    return [d for d in range(len(shape) - 1) if shape[d] > 1]


def _scales_gradients(site: Site) -> str | None:
    """Gradients over how often rows are read are no derivatives, whose derivatives could be taken."""
    return "leave out scale_grad_by_freq=True" if site.value("scale_grad_by_freq") else None


op(
    "Embedding",
    flow=embedding_flow,
    rule=embedding,
    lift=lift_embedding,
    new_rows=lambda node, shape: range(len(shape) - 1),
    read_dims=_dims_of_ids,
    counts_reads=True,
    once=_scales_gradients,
    saved_data=("indices", 0),
)


def bag_flow(site: Site, k: int, layouts: Layouts) -> Outcome:
    """A table read by row, several rows per result."""
    return Flow.SHARED if site.is_weight(k) else Flow.PROBE


def bag(use: Use) -> Factor | None:
    """Every entry of a bag gets the bag's cotangent, weighted (sum, mean), or one entry per column does (max)."""
    site, g = use.site, use.g
    samples = use.rows(1)
    if use.k != 0 or samples is None or site.value("scale_grad_by_freq"):
        return None
    if site.number("mode") == 2:
        return _bag_maxima(use, samples)
    ids, bags = site.tensor("indices"), site.tensor("result1")
    if len(bags) != len(ids):  # the CPU's fused sum keeps offsets only
        place = torch.arange(len(ids), device=ids.device)
        bags = torch.searchsorted(site.tensor("offsets").to(place.dtype), place, right=True) - 1
    live = ids != site.number("padding_idx")
    weights = site.optional("per_sample_weights")
    values = g.index_select(0, bags)
    if weights is not None and weights.numel():
        values = values * weights.reshape(-1, 1)
    if site.number("mode") == 1:
        sizes = rows_summed(live.to(wide(g.dtype)), bags, len(g)).clamp(min=1)
        values = (values / sizes.index_select(0, bags).unsqueeze(1)).to(g.dtype)
    sample = _samples_of_bags(use.layout, tuple(g.shape), bags)
    return _rows(use, SampleRows.labelled(use.batch, sample), ids.masked_fill(~live, -1), values, 1, skips=True)


@with_numbers
def _samples_of_bags(layout: Layout, shape: Shape, bags: Tensor) -> Tensor:
    """The sample of every entry of a bag."""
    return labels(layout, shape).reshape(-1).expand(shape[0]).index_select(0, read_numbers(bags).to("cpu"))


def _bag_maxima(use: Use, samples: SampleRows) -> Factor:
    """The row that was largest in each column of a bag; an empty bag has none."""
    winners = use.site.tensor("result3")
    width = use.target[1]
    flat = winners * width + torch.arange(width, device=winners.device)
    empty = (use.site.tensor("result2") == 0).reshape(-1, 1)
    flat = flat.masked_fill((winners < 0) | empty, -1)

    def read(grouped: list[Tensor]) -> Factor:
        factor = Rows(grouped[0].flatten(1) - 1, grouped[1].flatten(1), prod(use.target))
        return View(factor, use.target, Reshape(factor.shape, use.target))

    return samples.factor([flat + 1, use.g], read)


_BAG_RESULTS: dict[str, Callable[[Callable[[str], Any]], Any]] = {
    "result1": lambda get: get("offset2bag"),
    "result2": lambda get: get("bag_size"),
    "result3": lambda get: get("maximum_indices"),
}
op(
    "EmbeddingBag",
    flow=bag_flow,
    rule=bag,
    new_rows=_all_dims,
    counts_reads=True,
    once=_scales_gradients,
    aten=(Aten("_embedding_bag_backward.default", ("grad",), saved=_BAG_RESULTS, where=lambda get: not get("sparse")),),
)


# --- rows and elements by index ---


def selected_rows(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Rows of one dim."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    dim = site.number("dim") % max(len(shape), 1)
    moved = follow(layout, shape, target, but(shape, dim))
    if moved is not None and sample_dims(layout, shape):
        return moved
    if site.is_weight(k):
        return Flow.SHARED
    return _written_back(layout, shape, target, range(dim, dim + 1), [site.tensor("index")], dim)


def index_select(use: Use) -> Factor | None:
    """Rows of a table along dim 0."""
    samples = use.rows(1)
    if samples is None or not use.g.ndim or use.site.number("dim") % use.g.ndim != 0:
        return None
    return _rows(use, samples, use.site.tensor("index").reshape(-1), use.g, 1)


def lift_selected_rows(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """A table read once for all samples."""
    if not target or site.number("dim") % len(target) != 0:
        return None
    return _read_once(factor, target, site.tensor("index"))


def _selected_dim(node: Node, shape: Shape) -> Sequence[int]:
    return [saved.signed(int(saved.read(node, "dim"))) % len(shape)] if shape else []


def _first_dim(site: Site) -> list[int] | None:
    if site.number("dim") != 0:
        return None
    return [0]


op(
    "IndexSelect",
    flow=selected_rows,
    rule=index_select,
    lift=lift_selected_rows,
    section=True,
    new_rows=_selected_dim,
    read_dims=_first_dim,
    vmap=True,
)


def index_flow(site: Site, k: int, layouts: Layouts) -> Outcome:
    """``x[:, i, j]`` and its like."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    indices = {d: i for d, i in enumerate(site.indices()) if i is not None}
    if not indices or any(_is_mask(i) for i in indices.values()):
        raise Undecided
    block, adjacent = _block_of_indices(indices)
    kept = [d for d in range(len(target)) if d not in indices]
    to_dims = [None if d in block else kept[d if d < block.start else d - len(block)] for d in range(len(shape))]
    moved = follow(layout, shape, target, to_dims, len(kept) + len(indices))
    if moved is not None and sample_dims(layout, shape):
        return moved
    if site.is_weight(k):
        return Flow.SHARED
    return _written_back(layout, shape, target, block, [*indices.values()], block.start) if adjacent else Flow.PROBE


def _block_of_indices(indices: Mapping[int, Tensor]) -> tuple[range, bool]:
    """The dims of the result that the indices bring along, and whether the dims that they index are adjacent.

    They come where the first index stands if those dims are adjacent, and in front of all others if not.
    """
    indexed = list(indices)
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    start = indexed[0] if adjacent else 0
    return range(start, start + max(i.ndim for i in indices.values())), adjacent


def index(use: Use) -> Factor | None:
    """table[ids], or table[i, j, …] as rows of the flattened first dims."""
    indices = use.site.indices()
    while indices and indices[-1] is None:
        indices.pop()
    if not indices or any(i is None or _is_mask(i) for i in indices):
        return None
    flat = torch.zeros((), dtype=torch.int64, device=use.g.device)
    for ids, size in zip(indices, use.target, strict=False):
        flat = flat * size + torch.where(ids < 0, ids + size, ids)
    samples = use.rows(flat.ndim)
    return None if samples is None else _rows(use, samples, flat.reshape(-1), use.g, len(indices))


def lift_index(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """A table read by row, once for all samples."""
    first, *others = site.indices()
    if first is None or _is_mask(first) or any(t is not None for t in others):
        return None
    return _read_once(factor, target, torch.where(first < 0, first + target[0], first))


def _adds(get: Callable[[str], Any]) -> bool:
    """Rows that are read twice get both cotangents, which have the shape of what was read."""
    indices = {d: i for d, i in enumerate(get("indices")) if i is not None}
    if not get("accumulate") or not indices or any(_is_mask(i) for i in indices.values()):
        return False
    block, _ = _block_of_indices(indices)
    kept = [n for d, n in enumerate(get("self").shape) if d not in indices]
    read = torch.broadcast_shapes(*[i.shape for i in indices.values()])
    return tuple(get("values").shape) == (*kept[: block.start], *read, *kept[block.start :])


def _whole_source(get: Callable[[str], Any]) -> bool:
    """A source may be larger than its index, and is then read in part."""
    return bool(get("src").shape == get("index").shape)


def _dims_of_first_index(site: Site) -> list[int] | None:
    first, *others = site.indices()
    if first is None or _is_mask(first) or any(t is not None for t in others):
        return None
    return [d for d in range(first.ndim) if site.shapes[0][d] > 1]


_index = partial(op, flow=index_flow, rule=index, section=True, new_rows=_all_dims, read_dims=_dims_of_first_index)
_index("Index", vmap=True, lift=lift_index, aten=(Aten("index_put.default", ("values",), zeros="self", where=_adds),))
_index("UnsafeIndex")


def take(use: Use) -> Factor | None:
    """Elements of the flattened table."""
    samples = use.rows(use.g.ndim)
    if samples is None:
        return None
    ids = use.site.tensor("index").reshape(-1)
    return _rows(use, samples, torch.where(ids < 0, ids + prod(use.target), ids), use.g.reshape(-1), len(use.target))


op("Take", rule=take, new_rows=_all_dims)


def gather(use: Use) -> Factor | None:
    """Elements of the table: the index along one dim, the place itself along the others."""
    samples = use.rows(use.g.ndim)
    if samples is None or not use.g.ndim:
        return None
    dim, ids = use.site.number("dim") % use.g.ndim, use.site.tensor("index")
    flat = torch.zeros((), dtype=torch.int64, device=ids.device)
    for d, step in enumerate(strides(use.target)):
        place = torch.arange(ids.shape[d], device=ids.device).reshape([-1 if e == d else 1 for e in range(ids.ndim)])
        flat = flat + (ids if d == dim else place) * step
    return _rows(use, samples, flat.reshape(-1), use.g.reshape(-1), len(use.target))


op(
    "Gather",
    flow=along_dim,
    rule=gather,
    new_rows=_all_dims,
    aten=(Aten("scatter_add.default", ("src",), zeros="self", where=_whole_source),),
)
op("MaskedSelect", new_rows=_all_dims)
