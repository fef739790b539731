"""Small models of every kind that private training meets, with their data and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import mlp

EXAMPLES = 40


@dataclass(frozen=True)
class Kind:
    """A model, one tensor with all examples, and the losses of some of them."""

    make: Callable[[], nn.Module]
    data: Callable[[], Tensor]
    losses: Callable[[nn.Module, Tensor], Tensor]


def _summed(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


def _next_token(model: nn.Module, x: Tensor) -> Tensor:
    each = F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    return each.view(len(x), -1).mean(1)


class GPT(nn.Module):
    """Attention, norms, and a table that is also the head."""

    def __init__(self, vocabulary: int = 17, width: int = 8, longest: int = 12) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x) + self.places.weight[: x.shape[1]]
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](h)).chunk(3, -1))
        h = h + self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        h = h + self.down(F.gelu(self.up(self.norms[1](h))))
        return self.norms[2](h) @ self.table.weight.t()


class Bag(nn.Module):
    """Rows of a table, one of which is padding, and a weight that is used at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x).tanh()).sum(1)


class Half(nn.Module):
    """Parameters in float32, and products in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()).tanh()
        return x.float()


def cnn() -> nn.Module:
    """Convolutions with many places of the kernel, and with few."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


class Complex(nn.Module):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


KINDS = {
    "mlp": Kind(lambda: mlp(6, 7, 3, dtype=torch.float32), lambda: torch.randn(EXAMPLES, 6), _summed),
    "float64": Kind(lambda: mlp(6, 7, 3), lambda: torch.randn(EXAMPLES, 6).double(), _summed),
    "positions": Kind(lambda: mlp(4, 5, 3, dtype=torch.float32), lambda: torch.randn(EXAMPLES, 7, 4), _summed),
    "sequence": Kind(lambda: mlp(4, 5, 3, dtype=torch.float32), lambda: torch.randn(EXAMPLES, 40, 4), _summed),
    "cnn": Kind(cnn, lambda: torch.randn(EXAMPLES, 2, 6, 6), _summed),
    "bag": Kind(Bag, lambda: torch.randint(9, (EXAMPLES, 5)), _summed),
    "gpt": Kind(GPT, lambda: torch.randint(17, (EXAMPLES, 12)), _next_token),
    "bfloat16": Kind(Half, lambda: torch.randn(EXAMPLES, 6), _summed),
    "complex": Kind(Complex, lambda: torch.randn(EXAMPLES, 4), _summed),
}
