"""The model of the demo, trained with differential privacy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import persample as ps
from persample import dp

from .data import Digits
from .settings import Settings
from .training import accuracy, build


@dataclass(frozen=True)
class PrivateRun:
    """One run: noise and length were planned for its epsilon."""

    epsilon: float  # promised
    spent: float
    noise_multiplier: float
    steps: int
    clipped: float  # mean share of a batch
    accuracy: float  # on the test images


def plan_for(epsilon: float, digits: Digits, settings: Settings) -> dp.Plan:
    """The noise that keeps the promise for as many epochs as are wanted."""
    return dp.Plan(
        examples=len(digits.x),
        batch_size=settings.private_batch,
        epochs=settings.private_epochs,
        epsilon=epsilon,
        delta=settings.delta,
        accountant=settings.accountant,
    )


def train_privately(
    model: nn.Module, data: TensorDataset, plan: dp.Plan, settings: Settings, seed: int, advance: Callable[[], None]
) -> tuple[dp.Spent, list[float]]:
    """What was spent, and the share of samples that each step clipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.private_lr)
    private = dp.Private(model, optimizer, plan, clip=ps.ClippedSum(settings.max_norm), seed=seed)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.length)
    clipped = []
    for x, y in private.batches(data):
        losses = F.cross_entropy(model(x), y, reduction="none")
        clipped.append(private.step(losses).clipped)
        scheduler.step()
        advance()
    return private.spent(), clipped


def run_privately(
    epsilon: float, digits: Digits, settings: Settings, seed: int, advance: Callable[[], None]
) -> PrivateRun:
    """Plan, train from the beginning, and test."""
    torch.manual_seed(seed)
    plan, model = plan_for(epsilon, digits, settings), build()
    spent, clipped = train_privately(model, TensorDataset(digits.x, digits.y), plan, settings, seed, advance)
    right = accuracy(model, digits.test_x, digits.test_y)
    return PrivateRun(epsilon, spent.epsilon, plan.noise, spent.steps, sum(clipped) / len(clipped), right)
