"""Small models in float64 and batches that every process can compute for all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.reference import definition, vectors

WORDS, WIDTH, LENGTH, CLASSES = 7, 4, 3, 5


class Block(nn.Module):
    """Norm, two layers and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Word embedding, blocks and a head; 7 and 5 rows do not divide by the number of processes."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Unused(Net):
    """With a layer that odd ranks' samples do not come to."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, extra: bool = True) -> Tensor:
        x = self.words(ids).mean(1)
        return self.head(self.extra(x) if extra else x)


def make(kind: type[nn.Module] = Net) -> nn.Module:
    """The same weights in every process, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().double()


def batch(rank: int, size: int, step: int = 0) -> Tensor:
    """(B, T) ids of one rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(WORDS, (size, LENGTH), generator=generator)


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    """One loss per row."""
    return F.cross_entropy(model(ids), ids[:, 0] % CLASSES, reduction="none")


def rows_of_all(model: nn.Module, sizes: Sequence[int], step: int = 0) -> dict[str, Tensor]:
    """The gradients of all ranks' samples by definition, on a model that no wrapper has touched."""
    every = [definition(losses(model, batch(rank, size, step)), model) for rank, size in enumerate(sizes)]
    return {name: torch.cat([stacks[name] for stacks in every]) for name in every[0]}


def clipped(stacks: Mapping[str, Tensor], bound: float) -> dict[str, Tensor]:
    """The sum of clipped gradients by definition."""
    weights = (bound / vectors(stacks).norm(dim=1)).clamp(max=1)
    return {name: torch.einsum("b,b...->...", weights, stack) for name, stack in stacks.items()}


def close(got: Tensor, want: Tensor) -> None:
    """Raise unless two tensors are the same to 1e-9."""
    torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-9, atol=1e-9)


def all_close(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """The same for every parameter."""
    assert list(got) == list(want)
    for name in want:
        close(got[name], want[name])
