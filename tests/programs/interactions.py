"""Ops in which samples meet. The definition holds for them as for any other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .program import Program, op


@op
def interact(w: Program) -> bool:
    if not w.h.ndim or not w.h.numel():
        return False
    d, kind = w.whole(0, w.h.ndim - 1), w.whole(0, 6)
    n = w.h.shape[d]
    w.note(" ", kind, "dim", d)
    if kind == 0:
        w.h = w.h - w.h.mean(d, keepdim=True)
    elif kind == 1:
        w.h = w.h.softmax(d)
    elif kind == 2:
        w.h = torch.tensordot(w.randn(n, n), w.h, ([1], [d])).movedim(0, d)
    elif kind == 3:
        w.h = w.h + w.h.roll(1, d)
    elif kind == 4:
        w.h = w.h.cumsum(d) * 0.5
    elif kind == 5 and n > 1:
        w.h = w.h + 0.5 * w.h.index_select(d, w.permutation(n))
    elif w.h.ndim == 2 and len(w.h) > 1:
        w.h = F.batch_norm(w.h, None, None, w.weight(w.h.shape[1]), w.weight(w.h.shape[1]), training=True, eps=0.1)
        w.h = w.h.flatten().view(w.h.shape)  # see channel_norm
    return True


@op
def shared_term(w: Program) -> bool:
    """Something that all samples get whole."""
    w.h = w.h + w.weight(2, 3).square().mean()
    return True
