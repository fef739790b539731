"""Products with parameters, on either side, and with constants."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .program import Program, op


@op
def linear(w: Program) -> bool:
    free = w.free()
    if not free:
        return False
    w.to_end(w.pick(free))
    d, p = w.h.shape[-1], w.whole(1, 4)
    weight, bias = w.weight(p, d), w.weight(p) if w.chance() else None
    if w.chance(8):
        return w.become(checkpoint(F.linear, w.h, weight, bias, use_reentrant=False), 1)
    return w.become(F.linear(w.h, weight, bias), 1)


@op
def matmul_left(w: Program) -> bool:
    """W @ h: the contracted dim is the last but one."""
    free = w.free()
    if not free or w.h.ndim < 2:
        return False
    d = w.pick(free)
    w.to_end(d)
    out = w.weight(w.whole(1, 4), w.h.shape[-1]) @ w.h.mT
    w.become(out.mT, 1)
    return w.both(lambda t: t.mT)


@op
def matmul_right(w: Program) -> bool:
    free = w.free()
    if not free:
        return False
    w.to_end(w.pick(free))
    kind, d = w.whole(0, 3), w.h.shape[-1]
    if kind == 0:
        return w.become(w.h @ w.weight(d), 1)  # a vector
    if kind == 1 and w.h.ndim >= 3:  # a matrix per product
        return w.become(w.h @ w.weight(w.h.shape[-3] if w.h.ndim - 3 in w.free() else 1, d, 2), 1)
    if kind == 2:
        return w.become(torch.tensordot(w.h, w.weight(d, 3, 2), 1).flatten(-2), 1)
    return w.become(w.h @ w.weight(d, w.whole(1, 4)), 1)


@op
def einsum(w: Program) -> bool:
    """Contract some dims, share others, add new ones, in any order."""
    free, letters = w.free(), "abcdefgh"
    mine = letters[: w.h.ndim]
    role = [w.whole(0, 3) if d in free else 4 * int(w.chance(6)) for d in range(w.h.ndim)]
    contracted = [c for c, r in zip(mine, role, strict=True) if r == 1]
    shared = [c for c, r in zip(mine, role, strict=True) if r in (2, 4)]
    new = list("xy"[: w.whole(0, 2)])
    if not contracted + shared + new or w.h.ndim > 4:
        return False
    sizes = {**dict(zip(mine, w.h.shape, strict=True)), "x": 2, "y": 3}
    theirs = w.shuffled(contracted + shared + new)
    result = w.shuffled([c for c in mine if c not in contracted] + new)
    formula = f"{mine},{''.join(theirs)}->{''.join(result)}"
    w.note(" ", formula)
    w.h = torch.einsum(formula, w.h, w.weight(*[sizes[c] for c in theirs]))
    label = w.label
    for d in reversed([mine.index(c) for c in contracted]):
        label = label.select(d, 0)
    kept = [c for c in mine if c not in contracted] + new
    label = label.reshape([*label.shape, *[1] * len(new)]).permute([kept.index(c) for c in result])
    w.label = label.expand(w.h.shape)
    return True


@op
def batched_product(w: Program) -> bool:
    """bmm and baddbmm on either side."""
    free = w.free()
    if len(free) < 2:
        return False
    n, d = (free[i] for i in w.shuffled(range(len(free)))[:2])
    rest = [e for e in range(w.h.ndim) if e not in (n, d)]
    w.both(lambda t: t.permute(n, *rest, d).reshape(t.shape[n], -1, t.shape[d]))
    p = w.whole(1, 3)
    weight = w.weight(len(w.h), w.h.shape[-1], p)
    kind = w.whole(0, 2)
    if kind == 0:
        return w.become(torch.bmm(w.h, weight), 1)
    if kind == 1:
        return w.become(torch.baddbmm(w.weight(len(w.h), 1, p), w.h, weight, beta=0.5, alpha=2), 1)
    w.become(torch.bmm(weight.mT, w.h.mT).mT, 1)
    return w.both(lambda t: t.mT)


@op
def addmm(w: Program) -> bool:
    """With scalars, and with the samples in rows or columns."""
    free = w.free()
    if not free:
        return False
    w.to_end(w.pick(free))
    w.both(lambda t: t.reshape(-1, t.shape[-1]) if t.numel() else t.reshape(t[..., 0].numel(), t.shape[-1]))
    p = w.whole(1, 4)
    weight, bias = w.weight(w.h.shape[-1], p), w.weight(p)
    if w.chance():
        return w.become(torch.addmm(bias, w.h, weight, beta=0.5, alpha=2), 1)
    w.become(torch.addmm(bias.unsqueeze(1), weight.t(), w.h.t()).t(), 1)
    return w.both(lambda t: t.t())


@op
def bilinear(w: Program) -> bool:
    free = w.free()
    if not free:
        return False
    w.to_end(w.pick(free))
    d = w.h.shape[-1]
    return w.become(F.bilinear(w.h, w.h.tanh(), w.weight(2, d, d), w.weight(2) if w.chance() else None), 1)


@op
def constant_matrix(w: Program) -> bool:
    """A permutation or a choice of rows as a matrix product along any dim; anything along a free one."""
    if not w.h.ndim:
        return False
    d = w.whole(0, w.h.ndim - 1)
    n = w.h.shape[d]
    if not n:
        return False
    w.to_end(d)
    if d in w.free() and w.chance():
        return w.become(w.h @ w.randn(n, 3), 1)
    rows = w.permutation(n) if w.chance() else w.randint(n, w.whole(1, n))
    w.label = w.label[..., rows]
    w.h = w.h @ F.one_hot(rows, n).to(w.h.dtype).t()
    return True


@op
def one_hot_mask(w: Program) -> bool:
    """A square of which one element per row is taken: (h · mask).sum()."""
    pairs = [(d, e) for d in range(w.h.ndim) for e in range(w.h.ndim) if d != e and w.h.shape[d] == w.h.shape[e] > 1]
    if not pairs:
        return False
    w.to_end(*w.pick(pairs))
    mask = F.one_hot(w.permutation(w.h.shape[-1]), w.h.shape[-1])
    w.label = (w.label * mask).sum(-1)
    w.h = torch.einsum("...ij,ij->...i", w.h, mask.to(w.h.dtype)) if w.chance() else (w.h * mask).sum(-1)
    return True
