"""Tables read by row: embeddings, bags of embeddings, indexed parameters."""

from __future__ import annotations

import torch

from ...factors import Factor, Rows
from .registry import Use, rule


@rule("Embedding")
def embedding(use: Use) -> Factor | None:
    """Rows ids of the table; the row padding_idx gets nothing."""
    site = use.site
    if site.value("scale_grad_by_freq"):
        return None
    ids = site.tensor("indices")
    lanes = use.lanes(ids.ndim)
    if lanes is None:
        return None
    padding = site.number("padding_idx")
    flat = ids.reshape(-1)
    flat = flat.masked_fill(flat == padding, -1) if padding >= 0 else flat
    return _rows(use, flat, use.g.reshape(len(flat), -1))


def _rows(use: Use, ids: torch.Tensor, dy: torch.Tensor) -> Factor | None:
    """A factor of rows from flat ids (N,) and their cotangents (N, row)."""
    lanes = use.lanes(use.g.ndim - (len(use.target) - 1))
    if lanes is None:
        return None
    grouped = lanes.group(ids + 1) - 1  # padding of ragged samples is 0, which becomes -1: skipped
    values = lanes.group(dy).reshape(*grouped.shape, *use.target[1:])
    return Rows(grouped, values, use.target[0])


@rule("IndexSelect")
def index_select(use: Use) -> Factor | None:
    """Rows of a table along dim 0."""
    site = use.site
    if site.number("dim") % use.g.ndim != 0:
        return None
    ids = site.tensor("index")
    return _rows(use, ids, use.g.reshape(len(ids), -1))


@rule("Index")
def index(use: Use) -> Factor | None:
    """table[ids], or table[i, j, …] as rows of the flattened first dims."""
    indices = list(use.site.value("indices"))
    while indices and indices[-1] is None:
        indices.pop()
    if not indices or any(i is None or i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    sizes, target = use.target[: len(indices)], use.target
    flat = torch.zeros((), dtype=torch.int64, device=use.g.device)
    for ids, size in zip(indices, sizes, strict=True):
        flat = flat * size + torch.where(ids < 0, ids + size, ids)
    lanes = use.lanes(flat.ndim)
    if lanes is None:
        return None
    grouped = lanes.group(flat.reshape(-1) + 1) - 1
    count = 1
    for size in sizes:
        count *= size
    values = lanes.group(use.g.reshape(flat.numel(), -1)).reshape(*grouped.shape, *target[len(indices) :])
    return reshaped(Rows(grouped, values, count), target)


def reshaped(factor: Factor, target: tuple[int, ...]) -> Factor:
    """The same numbers under another shape."""
    from ...factors import View

    if factor.shape == target:
        return factor
    return View(factor, target, lambda stack: stack.reshape(len(stack), *target))


@rule("EmbeddingBag")
def embedding_bag(use: Use) -> Factor | None:
    """Sums and means of rows: every entry of a bag gets the bag's cotangent, weighted; padding gets nothing."""
    site, g = use.site, use.g
    mode = site.number("mode")  # 0 sum, 1 mean, 2 max
    if use.k != 0 or mode == 2 or site.value("scale_grad_by_freq"):
        return None
    ids, bag = site.tensor("indices"), site.tensor("result1")
    lanes = use.lanes(1)
    if lanes is None or len(bag) != len(ids):
        return None
    padding = site.number("padding_idx")
    live = ids != padding
    weights = site.optional("per_sample_weights")
    values = g.index_select(0, bag)
    if weights is not None and weights.numel():
        values = values * weights.reshape(-1, 1)
    if mode == 1:
        sizes = torch.zeros(len(g), dtype=g.dtype, device=g.device).index_add_(0, bag, live.to(g.dtype))
        values = values / sizes.clamp(min=1).index_select(0, bag).unsqueeze(1)
    return _bags(use, ids.masked_fill(~live, -1), bag, values)


def _bags(use: Use, ids: torch.Tensor, bag: torch.Tensor, values: torch.Tensor) -> Factor | None:
    from ..lanes import Lanes
    from ..layout import labels

    sample = labels(use.layout, tuple(use.g.shape)).reshape(-1).expand(len(use.g)).index_select(0, bag.to("cpu"))
    lanes = Lanes(use.batch, 0, 0, sample)
    return Rows(lanes.group(ids + 1) - 1, lanes.group(values), use.target[0])
