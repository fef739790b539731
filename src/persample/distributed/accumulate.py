"""Adding to ``p.grad`` without a backward, whose hooks would be DDP's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .shards import is_sharded, own_shard


def accumulate(p: Tensor, total: Tensor, hooks: Iterable[Callable[[Tensor], None]]) -> None:
    """Add to ``p.grad`` as a backward would, and call the hooks that wait for it; a sharded parameter takes its part.

    Autograd's own accumulation is not asked: DDP waits there, to take the mean over ranks of whatever comes.
    """
    g = own_shard(p, total) if is_sharded(p) else total.to(p.dtype)
    with torch.no_grad():
        if p.grad is None:
            p.grad = g if is_sharded(p) or g.stride() == p.stride() else torch.empty_like(p).copy_(g)
        elif p.grad.layout == torch.strided:
            p.grad += g
        else:
            p.grad = g + p.grad
        for hook in hooks:
            hook(p)
