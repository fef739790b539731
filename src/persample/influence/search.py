"""Exact search: every row is read once, as many at a time as fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..kernels.norms import row_norms
from .store import Folder, OpenChunk

Order = Literal["helpful", "harmful"]
_TINY = torch.finfo(torch.float32).tiny
_SCORE_BYTES = 24  # of one score, while the best are chosen


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
        """The scores of some rows after another."""
        start = 0
        for number, samples in enumerate(self.folder.samples):
            chunks = [self.folder.open(checkpoint, number) for checkpoint in range(len(self.queries))]
            first = chunks[0]
            ids = first.get("ids") if self.folder.plan.own_ids else first.get("ids") + start
            tokens = first.get("tokens") if first.has_tokens else None
            for some in self._ranges(len(first), tokens):
                total: Tensor | None = None
                for chunk, queries in zip(chunks, self.queries, strict=True):
                    scores = self._of_rows(chunk, queries, some, tokens)
                    total = scores if total is None else total.add_(scores)
                assert total is not None
                yield self._named(total.div_(len(chunks)), ids[_slice(some)], tokens, some)
            start += samples

    def _ranges(self, rows: int, tokens: Tensor | None) -> Iterator[range]:
        """As many rows at a time as there is room for scores; those of one sample are not parted if they are added."""
        step = max(1, self.max_memory // 2 // (_SCORE_BYTES * max(1, len(self.queries[0]))))
        ends = torch.arange(1, rows + 1)
        if tokens is not None and self.by_sample:
            ends = torch.cat([(tokens == 0).nonzero().flatten()[1:], torch.tensor([rows])])
        start = 0
        while start < rows:
            at = max(0, int(torch.searchsorted(ends, start + step, right=True)) - 1)
            end = int(ends[at]) if int(ends[at]) > start else int(ends[at + 1])
            yield range(start, end)
            start = end

    def _of_rows(self, chunk: OpenChunk, queries: Tensor, within: range, tokens: Tensor | None) -> Tensor:
        scores = queries.new_empty(len(queries), len(within))
        summed = tokens is not None and self.by_sample
        own = self.normalise and not summed  # every row by its own norm
        norms = chunk.get("norms") if own and self.columns is None else None
        for some, rows in chunk.rows(self.max_memory // 2, within):
            few = rows if self.columns is None else rows[:, self.columns]
            part = scores[:, some.start - within.start : some.stop - within.start]
            torch.mm(queries, few.t(), out=part) if len(queries) else None
            if own:
                lengths = row_norms(few).to(few.dtype) if norms is None else norms[some]
                part /= lengths.clamp(min=_TINY)
        if not summed:
            return scores
        assert tokens is not None
        samples = (tokens == 0).cumsum(0)[_slice(within)] - 1
        first, last = int(samples[0]), int(samples[-1])
        total = scores.new_zeros(len(scores), last + 1 - first).index_add_(1, samples - first, scores)
        if not self.normalise:
            return total
        return total / chunk.get("sample_norms")[first : last + 1].clamp(min=_TINY)

    def _named(self, scores: Tensor, ids: Tensor, tokens: Tensor | None, some: range) -> Part:
        if tokens is None:
            return Part(scores, ids, None)
        here = tokens[_slice(some)]
        return Part(scores, ids[here == 0], None) if self.by_sample else Part(scores, ids, here)

    def shares(self, places: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(Q, k) for some of the queries' columns each: what they add to the scores of the samples at these places."""
        found = {name: self.queries[0].new_zeros(places.shape) for name in columns}
        start = 0
        for number, samples in enumerate(self.folder.samples):
            inside = (places >= start) & (places < start + samples)
            wanted = (places[inside] - start).unique()
            for checkpoint, queries in enumerate(self.queries if len(wanted) else ()):
                rows = self._summed(self.folder.open(checkpoint, number), wanted)
                at = torch.searchsorted(wanted, (places - start).clamp(0, samples - 1)).clamp(max=len(wanted) - 1)
                for name, some in columns.items():
                    scores = (queries[:, some] @ rows[:, some].t()).gather(1, at) / len(self.queries)
                    found[name] += scores.masked_fill(~inside, 0)
            start += samples
        return found

    def _summed(self, chunk: OpenChunk, samples: Tensor) -> Tensor:
        """(n, D): some samples of a chunk, by what was asked of them; the rows of their tokens are added up."""
        firsts = (chunk.get("tokens") == 0).nonzero().flatten() if chunk.has_tokens else torch.arange(len(chunk))
        ends = torch.cat([firsts[1:], torch.tensor([len(chunk)])])
        found = []
        for first, end in zip(firsts[samples].tolist(), ends[samples].tolist(), strict=True):
            row = torch.stack([rows.sum(0) for _, rows in chunk.rows(self.max_memory, range(first, end))]).sum(0)
            found.append(row if self.columns is None else row[self.columns])
        return torch.stack(found)


def _slice(some: range) -> slice:
    return slice(some.start, some.stop)


def told(parts: Iterator[Part], samples: int, progress: Callable[[float], None]) -> Iterator[Part]:
    """The parts, and after each the share of so many samples that has been read."""
    read = 0
    for part in parts:
        yield part
        read += len(part.ids) if part.tokens is None else int((part.tokens == 0).sum())
        progress(read / samples)


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
    if values.shape[1] > 4 * k and len(values):  # far fewer to be sorted: all that reach the k-th highest value
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
