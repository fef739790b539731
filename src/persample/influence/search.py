"""Exact search: every row is read once, as many at a time as fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .store import Folder, OpenChunk

Order = Literal["helpful", "harmful"]
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Hits:
    """The examples with the highest scores for each of Q queries (the lowest, if the most harmful were asked for)."""

    ids: Tensor  # (Q, k)
    scores: Tensor  # (Q, k)
    tokens: Tensor | None = None  # (Q, k): positions, if tokens were asked for
    by_parameter: dict[str, Tensor] | None = None  # (Q, k) for each: what it adds to the scores


@dataclass(frozen=True)
class Part:
    """Scores of some rows."""

    scores: Tensor  # (Q, N)
    ids: Tensor  # (N,)
    tokens: Tensor | None


@dataclass(frozen=True)
class Search:
    """One question to an index: queries (Q, D) under each checkpoint, of some columns if not all are asked."""

    folder: Folder
    queries: Sequence[Tensor]
    columns: Tensor | None
    normalise: bool
    by_sample: bool  # add the rows of each sample's tokens up
    max_memory: int

    def parts(self) -> Iterator[Part]:
        """The scores of one chunk after another."""
        start = 0
        for number, samples in enumerate(self.folder.samples):
            total: Tensor | None = None
            for checkpoint, queries in enumerate(self.queries):
                scores = self._of_chunk(checkpoint, number, queries)
                total = scores if total is None else total.add_(scores)
            assert total is not None
            yield self._named(total.div_(len(self.queries)), number, start)
            start += samples

    def _of_chunk(self, checkpoint: int, number: int, queries: Tensor) -> Tensor:
        chunk = self.folder.open(checkpoint, number)
        scores = queries.new_empty(len(queries), len(chunk))
        own = self.normalise and not (chunk.has_tokens and self.by_sample)  # every row by its own norm
        norms = chunk.get("norms") if own and self.columns is None else None
        for some, rows in chunk.rows(self.max_memory):
            few = rows if self.columns is None else rows[:, self.columns]
            torch.mm(queries, few.t(), out=scores[:, some]) if len(queries) else None
            if own:
                lengths = few.norm(dim=1) if norms is None else norms[some]
                scores[:, some] /= lengths.clamp(min=_TINY)
        return self._by_sample(scores, chunk) if chunk.has_tokens and self.by_sample else scores

    def _by_sample(self, scores: Tensor, chunk: OpenChunk) -> Tensor:
        """Sums over each sample's tokens."""
        firsts = chunk.get("tokens") == 0
        total = scores.new_zeros(len(scores), int(firsts.sum())).index_add_(1, firsts.cumsum(0) - 1, scores)
        return total / chunk.get("sample_norms").clamp(min=_TINY) if self.normalise else total

    def _named(self, scores: Tensor, number: int, start: int) -> Part:
        chunk = self.folder.open(0, number)
        ids = chunk.get("ids")
        if not self.folder.plan.own_ids:
            ids = ids + start
        if not chunk.has_tokens:
            return Part(scores, ids, None)
        if not self.by_sample:
            return Part(scores, ids, chunk.get("tokens"))
        return Part(scores, ids[chunk.get("tokens") == 0], None)


def every(parts: Iterator[Part]) -> Part:
    """All scores, ids and tokens beside each other."""
    found = list(parts)
    tokens = (
        None
        if any(part.tokens is None for part in found)
        else torch.cat([p.tokens for p in found if p.tokens is not None])
    )
    return Part(torch.cat([part.scores for part in found], 1), torch.cat([part.ids for part in found]), tokens)


def top(parts: Iterator[Part], k: int, order: Order) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Ids, scores, tokens (Q, k) and places in the index of the best; of equal scores, the first ones."""
    sign, best, offset = (1 if order == "helpful" else -1), None, 0
    for part in parts:
        here = torch.arange(offset, offset + len(part.ids)).expand(len(part.scores), -1)
        offset += len(part.ids)
        tokens = None if part.tokens is None else part.tokens.to(torch.int64).expand_as(here)
        new = [part.scores * sign, part.ids.expand_as(here), here] + ([] if tokens is None else [tokens])
        new = (
            _first(new, k)
            if best is None
            else _first([torch.cat(pair, 1) for pair in zip(best, _first(new, k), strict=True)], k)
        )
        best = new
    if best is None:
        raise ValueError("the index is empty")
    return best[1], best[0] * sign, best[3] if len(best) > 3 else None, best[2]


def _first(columns: list[Tensor], k: int) -> list[Tensor]:
    """The k columns with the highest values of the first tensor; of equal ones, those that come first."""
    values = columns[0]
    if values.shape[1] > 4 * k:  # far fewer to be sorted: all that reach the k-th highest value
        least = values.topk(k, 1, sorted=False).values.amin(1, keepdim=True)
        keep = (values >= least).sum(1).max()
        order = _stably(
            values.masked_fill(values < least, -torch.inf).topk(int(keep), 1).indices.sort(1).values, values
        )
    else:
        order = values.sort(dim=1, descending=True, stable=True).indices
    return [t.gather(1, order[:, :k]) for t in columns]


def _stably(places: Tensor, values: Tensor) -> Tensor:
    """Places in ascending order, put in descending order of their values."""
    return places.gather(1, values.gather(1, places).sort(dim=1, descending=True, stable=True).indices)
