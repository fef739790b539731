"""Norms, convolutions, attention, reductions, recurrence: ops that mix free dims."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .program import Program, op


@op
def reduce(w: Program) -> bool:
    free = w.free()
    if not free:
        return False
    count = w.whole(1, min(2, len(free)))
    dims = sorted(free[i] for i in w.shuffled(range(len(free)))[:count])
    keepdim, kind = w.chance(), w.whole(0, 6)
    w.note(" ", kind, "dims", dims, "keepdim", keepdim)
    h = w.h
    label = w.label
    for d in reversed(dims):
        label = label.narrow(d, 0, 1) if keepdim else label.select(d, 0)
    if kind == 0:
        w.h = h.sum(dims, keepdim)
    elif kind == 1:
        w.h = h.mean(dims, keepdim)
    elif kind == 2:
        w.h = h.amax(dims, keepdim)
    elif kind == 3:
        w.h = h.logsumexp(dims, keepdim)
    elif kind == 4 and h.numel():
        w.h = h.var(dims, correction=0, keepdim=keepdim)
    elif kind == 5:
        w.h = torch.linalg.vector_norm(h + 0.1, dim=dims, keepdim=keepdim)
    else:
        for d in reversed(dims):
            h = h.max(d, keepdim).values if w.chance() else h.prod(d, keepdim)
        w.h = h
    w.label = label
    return True


@op
def along(w: Program) -> bool:
    """Fibres along one dim."""
    free = w.free()
    if not free:
        return False
    d, kind = w.pick(free), w.whole(0, 7)
    n = w.h.shape[d]
    w.note(" ", kind, "dim", d)
    if kind == 0:
        w.h = w.h.softmax(d)
    elif kind == 1:
        w.h = w.h.log_softmax(d)
    elif kind == 2:
        w.h = w.h.cumsum(d)
    elif kind == 3:
        w.h = w.h.sort(d).values
    elif kind == 4:
        w.h = w.h.cummax(d).values
    elif kind == 5:
        w.to_end(d)
        return w.become(w.h.topk(w.whole(1, n)).values, 1)
    elif kind == 6 and n % 2 == 0:
        w.to_end(d)
        return w.become(F.glu(w.h, -1), 1)
    elif w.h.numel():
        w.to_end(d)
        return w.become(torch.fft.rfft(w.h).abs().square(), 1)
    return True


@op
def layer_norm(w: Program) -> bool:
    free = w.free()
    if not free:
        return False
    count = w.whole(1, min(2, len(free)))
    w.to_end(*[free[i] for i in w.shuffled(range(len(free)))[:count]])
    shape = tuple(w.h.shape[-count:])
    if w.chance():
        w.h = F.layer_norm(w.h, shape, w.weight(*shape), w.weight(*shape), eps=0.1)
    else:
        w.h = F.rms_norm(w.h, shape, w.weight(*shape), eps=0.1)
    return True


@op
def channel_norm(w: Program) -> bool:
    """Group, instance and (frozen) batch norm."""
    if not w.images(w.whole(0, 2)) or not w.h.numel():
        return False
    channels, kind = w.h.shape[1], w.whole(0, 2)
    scale, shift = w.weight(channels), w.weight(channels)
    w.note(" ", kind, "of", tuple(w.h.shape))
    groups = w.pick([g for g in range(1, channels + 1) if channels % g == 0])
    if kind == 0 and w.h.numel() > groups:
        w.h = F.group_norm(w.h, groups, scale, shift, eps=0.1)
    elif kind == 1 and w.h.ndim > 2 and w.h[0, 0].numel() > 1:
        w.h = F.instance_norm(w.h, weight=scale, bias=shift, eps=0.1)
    else:
        mean, var = w.randn(channels), w.randn(channels).square() + 0.5
        w.h = F.batch_norm(w.h.contiguous(), mean, var, scale, shift, training=False)
    w.h = w.h.flatten().view(w.h.shape)  # PyTorch's batch norm on CPU gets some transposed tensors wrong
    return True


@op
def convolution(w: Program) -> bool:
    rank = w.whole(1, 2)
    if not w.images(rank):
        return False
    channels = w.h.shape[1]
    kernel = [w.whole(1, min(3, n)) for n in w.h.shape[2:]]
    groups = w.pick([g for g in range(1, channels + 1) if channels % g == 0])
    options: dict[str, Any] = {"stride": w.whole(1, 2), "padding": w.whole(0, 1), "groups": groups}
    per_group = w.whole(1, 2)
    transposed = w.chance(3)
    w.note(" ", "transposed" if transposed else "", kernel, options, tuple(w.h.shape))
    if transposed:
        weight = w.weight(channels, per_group, *kernel)
        fn: Any = F.conv_transpose1d if rank == 1 else F.conv_transpose2d
        if any(
            (n - 1) * options["stride"] - 2 * options["padding"] + k < 1
            for n, k in zip(w.h.shape[2:], kernel, strict=True)
        ):
            return False
    else:
        weight = w.weight(groups * per_group, channels // groups, *kernel)
        fn = F.conv1d if rank == 1 else F.conv2d
    bias = w.weight(groups * per_group) if w.chance() else None
    return w.become(fn(w.h, weight, bias, **options), 1 + rank)


@op
def resize(w: Program) -> bool:
    """Pooling, padding, interpolation."""
    if not w.images(1):
        return False
    kind, n = w.whole(0, 4), w.h.shape[2]
    w.note(" ", kind, "of", tuple(w.h.shape))
    if kind == 0:
        return w.become(F.pad(w.h, (1, w.whole(0, 1)), value=0.5), 1)
    if kind == 1 and n > 1:
        return w.become(F.pad(w.h, (1, 1), mode=w.pick(["reflect", "replicate", "circular"])), 1)
    if kind == 2:
        return w.become(F.interpolate(w.h, size=w.whole(1, 4), mode=w.pick(["nearest", "linear"])), 1)
    if kind == 3:
        return w.become(F.max_pool1d(w.h, min(2, n), stride=1), 1)
    return w.become(F.adaptive_avg_pool1d(w.h, w.whole(1, n)), 1)


@op
def attention(w: Program) -> bool:
    """Learned queries, keys and values over two free dims."""
    free = w.free()
    if len(free) < 2 or not w.h.numel():
        return False
    time, feature = (free[i] for i in w.shuffled(range(len(free)))[:2])
    w.to_end(time, feature)
    d, p = w.h.shape[-1], w.whole(1, 2) * 2
    q, k, v = (w.h @ w.weight(d, p) for _ in range(3))
    if w.chance(3):
        q = w.weight(2, p).expand(*w.h.shape[:-2], 2, p)
    if w.chance():
        return w.become(F.scaled_dot_product_attention(q, k, v, is_causal=w.chance()), 2)
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(-2, -3) for t in (q, k, v))
    bias = w.weight(2, 1, k.shape[-2]) if w.chance() else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return w.become(out.transpose(-2, -3).flatten(-2), 2)


@op
def recurrence(w: Program) -> bool:
    """A cell along one free dim, applied to another."""
    free = w.free()
    if len(free) < 2:
        return False
    time, feature = (free[i] for i in w.shuffled(range(len(free)))[:2])
    w.to_end(time, feature)
    d, p = w.h.shape[-1], w.whole(1, 3)
    inwards, back, bias = w.weight(d, p), w.weight(p, p), w.weight(p)
    s, states = w.h.new_zeros(p), []
    for x in w.h.unbind(-2):
        s = torch.tanh(x @ inwards + s @ back + bias)
        states.append(s)
    return w.become(torch.stack(states, -2) if w.chance() else s, 2)


@op
def loop(w: Program) -> bool:
    """A layer applied to every slice along any dim, one at a time."""
    if w.h.ndim < 2:
        return False
    d, to = w.whole(0, w.h.ndim - 1), w.whole(0, w.h.ndim - 1)
    free = [e for e in w.free() if e != d]
    if not free or not w.h.shape[d]:
        return False
    w.to_end(d, w.pick(free))
    weight = w.weight(w.h.shape[-1], w.whole(1, 3))
    w.note(" ", "over", w.h.shape[-2], "slices, stacked at", to)
    w.become(torch.stack([(x @ weight).tanh() for x in w.h.unbind(-2)], -2), 1)
    return w.both(lambda t: t.movedim(-2, to))


@op
def each_its_own(w: Program) -> bool:
    """Every slice along a dim goes its own way: some deeper than others, some with a weight of their own."""
    if w.h.ndim < 2:
        return False
    d = w.whole(0, w.h.ndim - 1)
    free = [e for e in w.free() if e != d]
    if not free or not 0 < w.h.shape[d] < 6:
        return False
    w.to_end(d, w.pick(free))
    weight = w.weight(w.h.shape[-1], w.h.shape[-1])
    slices = []
    for x in w.h.unbind(-2):
        for _ in range(w.whole(0, 2)):
            x = (x @ weight).tanh()
        slices.append(x * w.weight() if w.chance(4) else x)
    w.h = torch.stack(slices, -2)
    return True


class Scale(torch.autograd.Function):
    """Linear, written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0.7

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 0.7


class Shorten(torch.autograd.Function):
    """The identity, with a backward that is not linear: long cotangents along the last dim are made shorter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (1 + g.square().sum(-1, keepdim=True))


@op
def custom_function(w: Program) -> bool:
    if w.chance():
        w.h = Scale.apply(w.h)
    elif free := w.free():
        w.to_end(w.pick(free))
        w.h = Shorten.apply(w.h)
    else:
        return False
    return True
