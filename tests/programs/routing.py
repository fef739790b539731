"""Rows read, shuffled, dropped and added by index."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .program import Program, op


def _rows(w: Program, n: int) -> Tensor:
    """An order of n rows, or a choice among them with repeats."""
    return w.permutation(n) if w.chance() else w.randint(n, w.whole(0, n + 1))


@op
def select_rows(w: Program) -> bool:
    if not w.h.ndim:
        return False
    d = w.whole(0, w.h.ndim - 1)
    if not w.h.shape[d]:
        return False
    rows, kind = _rows(w, w.h.shape[d]), w.whole(0, 3)
    w.note(" ", kind, "dim", d, "rows", rows.tolist())
    if kind == 0:
        return w.both(lambda t: t.index_select(d, rows))
    if kind == 1:
        return w.both(lambda t: t[(slice(None),) * d + (rows,)])
    if kind == 2 and w.h.ndim == 2 and d == 0:
        w.h, w.label = F.embedding(rows, w.h), w.label[rows]
        return True
    index = rows.reshape([-1 if e == d else 1 for e in range(w.h.ndim)])
    index = index.expand([len(rows) if e == d else n for e, n in enumerate(w.h.shape)])
    return w.both(lambda t: t.gather(d, index))


@op
def select_places(w: Program) -> bool:
    """Two dims indexed at once, next to each other or not; or a mask."""
    if w.h.ndim < 2 or not w.h.numel():
        return False
    if w.chance(3):
        mask = w.randn(*w.h.shape[: w.whole(1, w.h.ndim)]) > -0.5
        return w.both(lambda t: t[mask])
    count = w.whole(1, 4)
    d = w.whole(0, w.h.ndim - 2)
    e = w.whole(d + 1, w.h.ndim - 1)
    i, j = w.randint(w.h.shape[d], count), w.randint(w.h.shape[e], count, 1 if w.chance() else count)
    key = [slice(None)] * w.h.ndim
    key[d], key[e] = i, j.squeeze(-1) if j.shape[-1] == 1 else j
    w.note(" ", "dims", d, e, "at", i.tolist(), j.tolist())
    return w.both(lambda t: t[tuple(key)])


@op
def gather_anywhere(w: Program) -> bool:
    """Every element of the result from anywhere along one dim."""
    if not w.h.ndim or not w.h.numel():
        return False
    d = w.whole(0, w.h.ndim - 1)
    index = w.randint(w.h.shape[d], *[n if e != d else w.whole(1, 4) for e, n in enumerate(w.h.shape)])
    if w.chance(3):
        flat = w.randint(w.h.numel(), w.whole(1, 8))
        return w.both(lambda t: t.take(flat))
    return w.both(lambda t: t.gather(d, index))


@op
def scatter_rows(w: Program) -> bool:
    """Rows written to other places of a larger, empty tensor."""
    if not w.h.ndim or not w.batch:
        return False
    d, kind = w.whole(0, w.h.ndim - 1), w.whole(0, 3)
    n = w.h.shape[d]
    size = n + w.whole(0, 2)
    rows = w.permutation(size)[:n]
    w.note(" ", kind, "dim", d, "rows", rows.tolist(), "of", size)

    def write(t: Tensor) -> Tensor:
        empty = t.new_zeros([size if e == d else m for e, m in enumerate(t.shape)])
        if kind == 0:
            return empty.index_add(d, rows, t)
        if kind == 1:
            return empty.index_copy(d, rows, t)
        if kind == 2:
            return empty.index_put((slice(None),) * 0 + (rows,), t) if d == 0 else empty.index_copy(d, rows, t)
        index = rows.reshape([-1 if e == d else 1 for e in range(t.ndim)]).expand(t.shape)
        return empty.scatter(d, index, t)

    return w.both(write)


@op
def experts(w: Program) -> bool:
    """Every row goes to one of several experts, or to none, and comes back to its place."""
    free = w.free()
    if not free or w.h.ndim < 2:
        return False
    w.to_end(w.pick(free))
    shape, d = w.h.shape, w.h.shape[-1]
    rows = w.h.reshape(-1, d) if w.h.numel() else w.h.reshape(w.h[..., 0].numel(), d)
    chosen = w.randint(3, len(rows)) if w.chance(4) is False else w.randint(1, len(rows))
    out = torch.zeros_like(rows) if w.chance() else rows
    for e in range(2):
        mine = (chosen == e).nonzero().squeeze(1)
        answer = (rows[mine] @ w.weight(d, d) + w.weight(d)).tanh() * w.weight()
        out = out.index_add(0, mine, answer)
    w.h = out.reshape(shape)
    return True


@op
def shuffle_and_back(w: Program) -> bool:
    """Rows in another order for one layer."""
    free = w.free()
    if not free or w.h.ndim < 2:
        return False
    w.to_end(w.pick(free))
    order = w.permutation(len(w.h))
    d = w.h.shape[-1]
    h = w.h[order] @ w.weight(d, d) + w.weight(d)
    w.h = h[order.argsort()] if w.chance() else torch.zeros_like(w.h).index_add(0, order, h)
    return True


@op
def embedding(w: Program) -> bool:
    """A table read at every place of the leading dims."""
    free = w.free()
    if not free:
        return False
    w.to_end(w.pick(free))
    lead = [n if w.chance() else 1 for n in w.h.shape[:-1]]
    ids = w.randint(4, *lead)
    table = w.weight(4, w.h.shape[-1])
    w.h = w.h + F.embedding(ids, table, padding_idx=0 if w.chance(3) else None)
    return True
