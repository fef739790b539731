"""Small models that many tests use, and a loss for each of their samples.

Functions make a model from its own seed, in float64 unless told otherwise, and leave the random numbers of the test
alone; classes are made as any other module. `..._and_losses(B)` is a `Program`: a model, and a function that runs it on
B samples, always the same ones, and returns their losses (B,). A test whose model is its point defines it itself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

Program: TypeAlias = tuple[nn.Module, Callable[[], Tensor]]


def squares(out: Tensor) -> Tensor:
    """(B, ...) -> (B,): the sum of squares of what the model says of each sample."""
    return out.square().unsqueeze(-1).flatten(1).sum(1)


def mlp(
    *widths: int, activation: type[nn.Module] = nn.Tanh, dtype: torch.dtype = torch.float64, seed: int = 0
) -> nn.Sequential:
    """Linear layers from width to width (3, 4, 2 unless told otherwise) with an activation between them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, *others = [nn.Linear(d, p) for d, p in pairwise(widths or (3, 4, 2))]
        between = [layer for linear in others for layer in (activation(), linear)]
        return nn.Sequential(first, *between).to(dtype)


def cnn(*channels: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Convolutions of 3 × 3 (channels 2, 4, 2 unless told otherwise), with a group norm and a ReLU in place between."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, *others = [nn.Conv2d(d, p, 3) for d, p in pairwise(channels or (2, 4, 2))]
        between = [layer for c in others for layer in (nn.GroupNorm(2, c.in_channels), nn.ReLU(inplace=True), c)]
        return nn.Sequential(first, *between).to(dtype)


class TiedEmbedding(nn.Module):
    """A table that is read by ids, and whose transpose turns what was read back into scores of all words."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).tanh() @ self.table.weight.t()


class Recurrent(nn.Module):
    """The states of an LSTM of two layers at all positions: (B, T, d) -> (B, T, p)."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(d, p, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.lstm(x)[0]
        return states


class Transformer(nn.Module):
    """Ids (B, T) -> scores of all words (B, T, words): words and places are embedded, attended to and scored."""

    def __init__(self, words: int, T: int, width: int, causal: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(T, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.head, self.causal = nn.Linear(width, words), causal

    def forward(self, ids: Tensor) -> Tensor:
        T = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(T) if self.causal else None
        h = self.layer(self.words(ids) + self.places(torch.arange(T)), src_mask=mask, is_causal=self.causal)
        scores: Tensor = self.head(h)
        return scores


class EveryForm(nn.Module):
    """Ids (B, T) -> losses (B,), with parameters whose gradients have every form.

    A table, a kernel, a recurrence, a linear layer with and without positions, vectors and a number; one layer is
    frozen, and one is not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.gru = nn.Embedding(6, 4), nn.Conv1d(4, 4, 2), nn.GRU(4, 3, batch_first=True)
        self.norm, self.frozen, self.out = nn.LayerNorm(3), nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2)
        self.scale, self.unused = nn.Parameter(torch.tensor(0.9)), nn.Linear(2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.gru(self.conv(self.table(ids).mT).mT)[0])
        return (self.out(self.frozen(h).sum(1)) * self.scale).sin().sum(1) + self.out(h).square().sum((1, 2))


def every_form(seed: int = 1) -> EveryForm:
    """The model with parameters of every form, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return EveryForm().double()


def mlp_and_losses(B: int = 5, *, positions: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> Program:
    """An MLP on samples (B, *positions, 3)."""
    return _on(mlp(dtype=dtype), _noise(B, *positions, 3).to(dtype))


def cnn_and_losses(B: int = 5, *, dtype: torch.dtype = torch.float64) -> Program:
    """A CNN on images (B, 2, 6, 6)."""
    return _on(cnn(dtype=dtype), _noise(B, 2, 6, 6).to(dtype))


def tied_and_losses(B: int = 5, *, dtype: torch.dtype = torch.float64) -> Program:
    """A tied embedding on ids (B, 4) of six words."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _on(TiedEmbedding(6, 3).to(dtype), torch.randint(6, (B, 4)))


def recurrent_and_losses(B: int = 5, *, T: int = 6, dtype: torch.dtype = torch.float64) -> Program:
    """An LSTM on sequences (B, T, 3)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _on(Recurrent(3, 4).to(dtype), _noise(B, T, 3).to(dtype))


def _on(model: nn.Module, x: Tensor) -> Program:
    return model, lambda: squares(model(x))


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
