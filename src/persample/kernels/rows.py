"""Rows added up by index, and inner products of rows that have an index in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .norms import wide

__all__ = ["Segments", "add_products", "rows_summed"]


def rows_summed(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """(N, ...) -> (count, ...): Σ_n rows[n] by index[n]; half precision is added up in float32, and rounded once.

    >>> rows_summed(torch.ones(3000, dtype=torch.bfloat16), torch.zeros(3000, dtype=torch.long), 2)
    tensor([3008.,    0.], dtype=torch.bfloat16)
    """
    total = torch.zeros(count, *rows.shape[1:], dtype=wide(rows.dtype), device=rows.device)
    return total.index_add_(0, index, rows.to(total.dtype)).to(rows.dtype)


class Segments(NamedTuple):
    """Rows sorted by id: where those of an id begin, and how many there are."""

    ids: Tensor  # (n,), each once
    starts: Tensor  # (n,)
    counts: Tensor  # (n,)
    order: Tensor  # the places of the rows before they were sorted

    @classmethod
    def of(cls, ids: Tensor) -> Segments:
        """Those of rows with these ids."""
        ordered, order = ids.sort()
        each, counts = torch.unique_consecutive(ordered, return_counts=True)
        return cls(each, counts.cumsum(0) - counts, counts, order)

    def at(self, some: Tensor) -> Segments:
        """Some of the segments."""
        return Segments(self.ids[some], self.starts[some], self.counts[some], self.order)

    def in_common(self, other: Segments) -> tuple[Segments, Segments]:
        """The segments of both whose ids both have."""
        if not len(other.ids):
            return self.at(other.ids), other
        place = torch.searchsorted(other.ids, self.ids).clamp(max=len(other.ids) - 1)
        both = (other.ids[place] == self.ids).nonzero().squeeze(1)
        return self.at(both), other.at(place[both])


def add_products(
    out: Tensor,
    mine: tuple[Segments, Tensor, Tensor],
    theirs: tuple[Segments, Tensor, Tensor],
    chunks: Callable[[int], Iterator[slice]],
) -> None:
    """out[a, b] += ⟨x, y⟩ for all rows x of sample a and y of sample b that have the same id.

    Both sides are segments, which have the same ids, the sample of every row, and the rows. ``chunks`` says how many of
    so many pairs to take at a time.
    """
    (left, sample_of, rows), (right, others_sample_of, others) = mine, theirs
    pairs = left.counts * right.counts
    ends = pairs.cumsum(0)
    for some in chunks(int(ends[-1]) if len(ends) else 0):
        pair = torch.arange(some.start, some.stop, device=out.device)
        segment = torch.searchsorted(ends, pair, right=True)
        pair = pair - (ends - pairs)[segment]
        width = right.counts[segment]
        i = left.order[left.starts[segment] + pair // width]
        j = right.order[right.starts[segment] + pair % width]
        products = (rows[i] * others[j]).sum(1)
        out.view(-1).index_add_(0, sample_of[i] * out.shape[1] + others_sample_of[j], products.to(out.dtype))
