"""Small models to try `persample audit` and `persample bench` with: each is a SPEC, as persample.audit.models:mlp."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any, Any, Any]
_cross_entropy = partial(F.cross_entropy, reduction="none")


def mlp(batch_size: int = 64) -> Made:
    """Three linear layers."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.randn(batch_size, 64), torch.randint(10, (batch_size,)), _cross_entropy


def cnn(batch_size: int = 64) -> Made:
    """Two convolutions with group norm, one linear layer, on images of 16 by 16."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    return model, torch.randn(batch_size, 1, 16, 16), torch.randint(10, (batch_size,)), _cross_entropy


class Decoder(nn.Module):
    """Embeddings with learned positions, pre-norm transformer layers and a head: the loss of every next token."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of every sequence, (B,), from tokens (B, T)."""
        T = ids.shape[1] - 1
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=ids.device)
        h = self.token(ids[:, :-1]) + self.position(torch.arange(T, device=ids.device))
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(h).mT, ids[:, 1:], reduction="none").mean(1)


def transformer(batch_size: int = 16) -> tuple[nn.Module, Tensor]:
    """A decoder of two layers on sequences of 32 tokens."""
    return Decoder(256, 64, 2, 4, 32), torch.randint(256, (batch_size, 33))


class LastOutput(nn.Module):
    """Embedding, LSTM, and a linear layer on its last output."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.token, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores (B, classes) from tokens (B, T)."""
        return self.head(self.lstm(self.token(ids))[0][:, -1])  # type: ignore[no-any-return]


def lstm(batch_size: int = 32) -> Made:
    """One LSTM layer on sequences of 24 tokens."""
    return (
        LastOutput(256, 64, 10),
        torch.randint(256, (batch_size, 24)),
        torch.randint(10, (batch_size,)),
        _cross_entropy,
    )


MODELS = ("mlp", "cnn", "transformer", "lstm")
