"""Scikit-learn's digits, with some of the training labels flipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor

CLASSES = 10


@dataclass(frozen=True)
class Digits:
    """Images as (N, 1, 8, 8) in [0, 1]; ``y`` is what training is told, ``true`` what the dataset says."""

    x: Tensor
    y: Tensor
    true: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def flipped(self) -> Tensor:
        """Which training labels are wrong, (N,) of bool."""
        return self.y != self.true

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Training images, and the labels that they were given."""
        return self.x[ids], self.y[ids]


def load(test: int, share: float, seed: int) -> Digits:
    """All images, ``test`` of them kept back, and ``share`` of the other labels flipped."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    rng = torch.Generator().manual_seed(seed)
    held, train = torch.randperm(len(x), generator=rng).tensor_split([test])
    return Digits(x[train], flip(y[train], share, rng), y[train], x[held], y[held])


def flip(labels: Tensor, share: float, rng: torch.Generator) -> Tensor:
    """``share`` of the labels, rounded to a whole number, each replaced by another class; all others equally likely."""
    labels = labels.clone()
    chosen = torch.randperm(len(labels), generator=rng)[: round(share * len(labels))]
    labels[chosen] = (labels[chosen] + torch.randint(1, CLASSES, chosen.shape, generator=rng)) % CLASSES
    return labels
