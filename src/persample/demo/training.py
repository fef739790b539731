"""A small CNN, and steps that look at every sample's gradient on the way."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps

from .data import CLASSES, Digits
from .noise_scale import Moments, moments
from .settings import Settings


def build() -> nn.Module:
    """Two convolutions with group norm, which does not mix samples as batch norm would."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, CLASSES),
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, population: int) -> Moments:
    """An ordinary step; its backward also gives the norm of every sample's gradient."""
    losses = F.cross_entropy(model(x), y, reduction="none")
    mean = torch.full((len(x),), 1 / len(x))
    norms, gradient = ps.reduce(losses, model, ps.Norms(), ps.WeightedSum(mean))
    for name, p in model.named_parameters():
        p.grad = gradient[name]
    optimizer.step()
    return moments(norms, gradient, population)


@dataclass(frozen=True)
class Epoch:
    """What an epoch leaves: the model as it was, the learning rate, and the moments of its batches' gradients."""

    model: nn.Module
    lr: float
    batches: list[Moments]


def train(model: nn.Module, digits: Digits, settings: Settings, seed: int, advance: Callable[[], None]) -> list[Epoch]:
    """Train, and keep a checkpoint of every epoch; ``advance`` is called at every step."""
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs)
    epochs = []
    for _ in range(settings.epochs):
        steps = []
        for rows in torch.randperm(len(digits.x), generator=rng).split(settings.batch):
            steps.append(train_step(model, optimizer, digits.x[rows], digits.y[rows], len(digits.x)))
            advance()
        epochs.append(Epoch(deepcopy(model), optimizer.param_groups[0]["lr"], steps))
        scheduler.step()
    return epochs


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of images whose likeliest class is their label."""
    return float((model(x).argmax(1) == y).float().mean())
