"""Tables read by row or by element: embeddings, bags of embeddings, indexed and gathered parameters."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ...factors import Factor, Rows, View
from ...factors.moves import Reshape
from ..lanes import Lanes
from ..layout import labels, strides
from .registry import Use, rule


def _rows(use: Use, lanes: Lanes, ids: Tensor, dy: Tensor, parts: int) -> Factor:
    """Flat ids (N,) into the first ``parts`` dims of the table, and their cotangents (N, ...); id -1 is skipped."""
    target = use.target
    grouped = lanes.group(ids + 1) - 1  # ragged samples are padded with zeros, which become -1
    values = lanes.group(dy.reshape(len(ids), *target[parts:]))
    factor = Rows(grouped, values, prod(target[:parts]))
    if factor.shape == target:
        return factor
    return View(factor, target, Reshape(factor.shape, target))


@rule("Embedding")
def embedding(use: Use) -> Factor | None:
    """Rows ids of the table; the row padding_idx gets nothing, and frequent ids may count less."""
    site, ids = use.site, use.site.tensor("indices")
    lanes = use.lanes(ids.ndim)
    if lanes is None:
        return None
    flat, dy = ids.reshape(-1), use.g.reshape(ids.numel(), use.target[1])
    if site.value("scale_grad_by_freq"):
        dy = dy / torch.bincount(flat, minlength=use.target[0])[flat].unsqueeze(1)
    padding = site.number("padding_idx")
    flat = flat.masked_fill(flat == padding, -1) if padding >= 0 else flat
    return _rows(use, lanes, flat, dy, 1)


@rule("IndexSelect")
def index_select(use: Use) -> Factor | None:
    """Rows of a table along dim 0."""
    lanes = use.lanes(1)
    if lanes is None or use.site.number("dim") % use.g.ndim != 0:
        return None
    return _rows(use, lanes, use.site.tensor("index").reshape(-1), use.g, 1)


@rule("Index UnsafeIndex")
def index(use: Use) -> Factor | None:
    """table[ids], or table[i, j, …] as rows of the flattened first dims."""
    indices = list(use.site.value("indices"))
    while indices and indices[-1] is None:
        indices.pop()
    if not indices or any(i is None or i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    flat = torch.zeros((), dtype=torch.int64, device=use.g.device)
    for ids, size in zip(indices, use.target, strict=False):
        flat = flat * size + torch.where(ids < 0, ids + size, ids)
    lanes = use.lanes(flat.ndim)
    return None if lanes is None else _rows(use, lanes, flat.reshape(-1), use.g, len(indices))


@rule("Take")
def take(use: Use) -> Factor | None:
    """Elements of the flattened table."""
    lanes = use.lanes(use.g.ndim)
    if lanes is None:
        return None
    ids = use.site.tensor("index").reshape(-1)
    return _rows(use, lanes, torch.where(ids < 0, ids + prod(use.target), ids), use.g.reshape(-1), len(use.target))


@rule("Gather")
def gather(use: Use) -> Factor | None:
    """Elements of the table: the index along one dim, the place itself along the others."""
    lanes = use.lanes(use.g.ndim)
    if lanes is None or not use.g.ndim:
        return None
    dim, ids = use.site.number("dim") % use.g.ndim, use.site.tensor("index")
    flat = torch.zeros((), dtype=torch.int64, device=ids.device)
    for d, step in enumerate(strides(use.target)):
        place = torch.arange(ids.shape[d], device=ids.device).reshape([-1 if e == d else 1 for e in range(ids.ndim)])
        flat = flat + (ids if d == dim else place) * step
    return _rows(use, lanes, flat.reshape(-1), use.g.reshape(-1), len(use.target))


@rule("EmbeddingBag")
def embedding_bag(use: Use) -> Factor | None:
    """Every entry of a bag gets the bag's cotangent, weighted (sum, mean), or one entry per column does (max)."""
    site, g = use.site, use.g
    lanes = use.lanes(1)
    if use.k != 0 or lanes is None or site.value("scale_grad_by_freq"):
        return None
    if site.number("mode") == 2:
        return _bag_maxima(use, lanes)
    ids, bag = site.tensor("indices"), site.tensor("result1")
    if len(bag) != len(ids):  # the CPU's fused sum keeps offsets only
        place = torch.arange(len(ids), device=ids.device)
        bag = torch.searchsorted(site.tensor("offsets").to(place.dtype), place, right=True) - 1
    live = ids != site.number("padding_idx")
    weights = site.optional("per_sample_weights")
    values = g.index_select(0, bag)
    if weights is not None and weights.numel():
        values = values * weights.reshape(-1, 1)
    if site.number("mode") == 1:
        sizes = torch.zeros(len(g), dtype=g.dtype, device=g.device).index_add_(0, bag, live.to(g.dtype))
        values = values / sizes.clamp(min=1).index_select(0, bag).unsqueeze(1)
    sample = labels(use.layout, tuple(g.shape)).reshape(-1).expand(len(g)).index_select(0, bag.to("cpu"))
    return _rows(use, Lanes.labelled(use.batch, sample), ids.masked_fill(~live, -1), values, 1)


def _bag_maxima(use: Use, lanes: Lanes) -> Factor:
    """The row that was largest in each column of a bag; an empty bag has none."""
    winners = use.site.tensor("result3")
    width = use.target[1]
    flat = winners * width + torch.arange(width, device=winners.device)
    empty = (use.site.tensor("result2") == 0).reshape(-1, 1)
    flat = flat.masked_fill((winners < 0) | empty, -1)
    grouped = lanes.group(flat + 1).flatten(1) - 1
    factor = Rows(grouped, lanes.group(use.g).flatten(1), prod(use.target))
    return View(factor, use.target, Reshape(factor.shape, use.target))
