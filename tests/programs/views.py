"""Ops that move elements about, and elementwise ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .program import Program, op


@op
def permute(w: Program) -> bool:
    if w.h.ndim < 2:
        return False
    order = w.shuffled(range(w.h.ndim))
    w.note(" ", order)
    return w.both(lambda t: t.permute(order))


@op
def merge(w: Program) -> bool:
    """Fold two neighbours: (B, T, C) -> (B·T, C)."""
    if w.h.ndim < 2:
        return False
    d = w.whole(0, w.h.ndim - 2)
    return w.both(lambda t: t.flatten(d, d + 1))


@op
def divide(w: Program) -> bool:
    """Unfold a dim, aligned with the batch or not."""
    dims = [d for d, n in enumerate(w.h.shape) if n > 1]
    if not dims:
        return False
    d = w.pick(dims)
    n = w.h.shape[d]
    a = w.pick([a for a in range(1, n + 1) if n % a == 0])
    return w.both(lambda t: t.unflatten(d, (a, n // a)))


@op
def refactor(w: Program) -> bool:
    """Any other shape."""
    count, shape = w.h.numel(), []
    if not count:
        return False
    for _ in range(w.whole(1, 3)):
        shape.append(w.pick([a for a in range(1, count + 1) if count % a == 0]))
        count //= shape[-1]
    return w.both(lambda t: t.reshape(*shape, count))


@op
def windows(w: Program) -> bool:
    """(N, H, C) -> (N·nW, H/nW, C) and the like, with the parts in either order."""
    d = w.whole(0, max(w.h.ndim - 1, 0))
    if not w.h.ndim or w.h.shape[d] < 2:
        return False
    n = w.h.shape[d]
    size = w.pick([a for a in range(1, n + 1) if n % a == 0])
    swap, front = w.chance(), w.chance()

    def partition(t: torch.Tensor) -> torch.Tensor:
        t = t.unflatten(d, (n // size, size))
        t = t.transpose(d, d + 1) if swap else t
        t = t.movedim(d, 0) if front else t
        return t.flatten(0, 1)

    return w.both(partition)


@op
def size_one(w: Program) -> bool:
    d = w.whole(0, w.h.ndim)
    if d < w.h.ndim and w.h.shape[d] == 1:
        return w.both(lambda t: t.squeeze(d))
    return w.both(lambda t: t.unsqueeze(d))


@op
def repeat(w: Program) -> bool:
    if not w.h.ndim:
        return False
    d, times, kind = w.whole(0, w.h.ndim - 1), w.whole(1, 3), w.whole(0, 2)
    if kind == 0:
        return w.both(lambda t: t.repeat([times if e == d else 1 for e in range(t.ndim)]))
    if kind == 1:
        return w.both(lambda t: t.repeat_interleave(times, d))
    return w.both(lambda t: t.unsqueeze(d).expand(*t.shape[:d], times, *t.shape[d:]))


@op
def reorder(w: Program) -> bool:
    """Flip, roll, cut and put together again, along any dim."""
    if not w.h.ndim:
        return False
    d, kind = w.whole(0, w.h.ndim - 1), w.whole(0, 4)
    n = w.h.shape[d]
    cut = w.whole(0, n)
    w.note(" ", kind, "dim", d, "at", cut)
    if kind == 0:
        return w.both(lambda t: t.flip(d))
    if kind == 1:
        return w.both(lambda t: t.roll(cut, d))
    if kind == 2:
        return w.both(lambda t: torch.cat([t.narrow(d, cut, n - cut), t.narrow(d, 0, cut)], d))
    if kind == 3 and n:
        to = w.whole(0, w.h.ndim - 1)
        return w.both(lambda t: torch.stack(t.unbind(d), to))
    size = w.whole(1, max(n, 1))
    return w.both(lambda t: torch.cat(t.split(size, d)[::-1], d))


@op
def section(w: Program) -> bool:
    """Part of a dim; of the batch's too, now and then: the other samples' losses are zero then."""
    dims = list(range(w.h.ndim)) if w.chance(4) else w.free()
    if not dims:
        return False
    d = w.pick(dims)
    n = w.h.shape[d]
    if not n:
        return False
    kind, start = w.whole(0, 2), w.whole(0, n - 1)
    w.note(" ", kind, "dim", d, "from", start)
    if kind == 0:
        return w.both(lambda t: t.select(d, start))
    if kind == 1:
        return w.both(lambda t: t[(slice(None),) * d + (slice(start, None, 2),)])
    return w.both(lambda t: t.narrow(d, start, w_len)) if (w_len := w.whole(1, n - start)) else False


ELEMENTWISE = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": torch.relu,
    "abs": torch.abs,
    "softplus": F.softplus,
    "square": lambda t: 0.3 * t.square(),
    "leaky": F.leaky_relu,
    "clamp": lambda t: t.clamp(-1, 1),
    "clone": lambda t: t.clone(memory_format=torch.contiguous_format),
    "half and back": lambda t: t.float().double() * 0.5 + t,
}


@op
def elementwise(w: Program) -> bool:
    name = w.pick(list(ELEMENTWISE))
    w.note(" ", name)
    w.h = ELEMENTWISE[name](w.h)
    return True


@op
def masked(w: Program) -> bool:
    mask = w.randn(*w.h.shape) > 0
    kind = w.whole(0, 2)
    if kind == 0:
        w.h = w.h.masked_fill(mask, 0.5)
    elif kind == 1:
        w.h = torch.where(mask, w.h, w.weight())
    else:
        w.h = w.h * mask
    return True


@op
def broadcast(w: Program) -> bool:
    """A parameter along any dims, the batch's too: then it holds something for every sample."""
    everywhere = w.chance(5)
    free = w.free()
    shape = [n if (everywhere or d in free) and w.chance() else 1 for d, n in enumerate(w.h.shape)]
    while shape and shape[0] == 1 and w.chance():
        shape.pop(0)
    p = w.weight(*shape)
    kind = w.whole(0, 6)
    w.note(" ", kind, "parameter", tuple(shape))
    if kind == 0:
        w.h = w.h + p
    elif kind == 1:
        w.h = w.h * p
    elif kind == 2:
        w.h = p - 0.7 * w.h
    elif kind == 3:
        w.h = w.h / (1 + p.square())
    elif kind == 4:
        w.h = torch.lerp(w.h, p.expand_as(w.h), 0.3)
    elif kind == 5:
        w.h = torch.addcmul(w.h, p, w.h.tanh(), value=0.5)
    else:
        w.h = torch.maximum(w.h, p)
    return True


@op
def in_place(w: Program) -> bool:
    """Writing into part of a tensor."""
    if not w.h.ndim:
        return False
    h, d = w.h.clone(), w.whole(0, w.h.ndim - 1)
    n = h.shape[d]
    start = w.whole(0, max(n - 1, 0))
    part = h.narrow(d, start, w.whole(0, n - start))
    kind = w.whole(0, 3)
    w.note(" ", kind, "dim", d, "from", start, "size", part.shape[d])
    if kind == 0:
        part.mul_(w.weight())
    elif kind == 1:
        part.add_(w.weight(*[1] * (h.ndim - 1), h.shape[-1]) if d != h.ndim - 1 else w.weight())
    elif kind == 2:
        part.zero_()
    else:
        part.copy_(w.h.narrow(d, start, part.shape[d]).sin() * w.weight())
    w.h = h
    return True


@op
def residual(w: Program) -> bool:
    """A state of the past, if its samples are where ours are."""
    fitting = [h for h, label in w.past if label.shape == w.label.shape and torch.equal(label, w.label)]
    if not fitting:
        return False
    w.h = w.h + w.pick(fitting) if w.chance() else torch.stack([w.h, w.pick(fitting)]).mean(0)
    return True
