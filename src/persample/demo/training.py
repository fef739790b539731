"""A small CNN, steps that look at every sample's gradient on the way, and the same run without some examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample import influence as pi

from .data import CLASSES, Digits
from .noise_scale import Moments, moments
from .settings import Settings


def build() -> nn.Module:
    """Two convolutions with group norm, which does not mix samples as batch norm would; smooth, so that a run without
    a few examples goes nearly the same way."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, CLASSES),
    )


def losses_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One loss per image."""
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def train_step(losses: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer, population: int) -> Moments:
    """An ordinary step; its backward also gives the norm of every sample's gradient."""
    mean = torch.full((len(losses),), 1 / len(losses))
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


def train(digits: Digits, settings: Settings, seed: int, folder: Path, advance: Callable[[], None]) -> list[Epoch]:
    """Train, record the run in a folder, and keep a checkpoint of every epoch; ``advance`` is called at every step."""
    model, optimizer, scheduler = start(settings, seed)
    epochs = []
    with pi.Recording(folder, model, optimizer, losses_fn) as recording:
        for order in orders(digits, settings, seed):
            steps = []
            for ids in order.split(settings.batch):
                losses = recording.losses(digits.batch(ids), ids)
                steps.append(train_step(losses, model, optimizer, len(digits.x)))
                advance()
            epochs.append(Epoch(deepcopy(model), optimizer.param_groups[0]["lr"], steps))
            scheduler.step()
    return epochs


def train_on(kept: Tensor, digits: Digits, settings: Settings, seed: int) -> nn.Module:
    """The same run, the same batches, but only the examples ``kept`` count."""
    weights = torch.zeros(len(digits.x))
    weights[kept] = 1
    model, optimizer, scheduler = start(settings, seed)
    for order in orders(digits, settings, seed):
        for ids in order.split(settings.batch):
            optimizer.zero_grad()
            (losses_fn(model, digits.batch(ids)) * weights[ids]).mean().backward()
            optimizer.step()
        scheduler.step()
    return model


def start(
    settings: Settings, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """A new model, which depends on the seed alone, and what trains it."""
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs)


def orders(digits: Digits, settings: Settings, seed: int) -> Iterator[Tensor]:
    """The order of the examples in every epoch."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(settings.epochs):
        yield torch.randperm(len(digits.x), generator=rng)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of images whose likeliest class is their label."""
    return float((model(x).argmax(1) == y).float().mean())
