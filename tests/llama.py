"""A decoder of the kind of Llama 3, from plain modules: RMS norms, rotated positions, grouped queries, gated layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.each = heads, kv_heads, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.each, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.each)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """By default with the 70 billion parameters of the real one."""

    def __init__(
        self,
        layers: int = 80,
        width: int = 8192,
        heads: int = 64,
        kv_heads: int = 8,
        hidden: int = 28672,
        words: int = 128256,
    ) -> None:
        super().__init__()
        self.each = width // heads
        self.words, self.norm = nn.Embedding(words, width), RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList([Block(width, heads, kv_heads, hidden) for _ in range(layers)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        rates = 5e5 ** (-torch.arange(0, self.each, 2, device=ids.device, dtype=x.dtype) / self.each)
        angles = torch.arange(ids.shape[1], device=ids.device, dtype=x.dtype).unsqueeze(1) * rates
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean over the tokens of each text."""
    scores, following = model(ids)[:, :-1], ids[:, 1:]
    each = F.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="none")
    return each.unflatten(0, following.shape).mean(1)


def small() -> Llama:
    """The same in small."""
    return Llama(layers=2, width=16, heads=4, kv_heads=2, hidden=24, words=40)
