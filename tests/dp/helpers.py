"""A small private run, to be varied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import persample as ps
from persample import dp
from tests.models import mlp

EXAMPLES, WIDTH, CLASSES = 60, 5, 3


def dataset(examples: int = EXAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, WIDTH, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (examples,), generator=generator))


def network() -> nn.Module:
    """The same numbers every time."""
    return mlp(WIDTH, 7, CLASSES, dtype=torch.float32, seed=2)


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def plan(**more: Any) -> dp.Plan:
    base: dict[str, Any] = {
        "examples": EXAMPLES,
        "batch_size": 12,
        "steps": 6,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "accountant": "rdp",
    }
    return dp.Plan(**{**base, **more})


def private(
    model: nn.Module | None = None,
    plan_: dp.Plan | None = None,
    clip: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    **more: Any,
) -> dp.Private:
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if optimizer is None else optimizer
    clip = ps.ClippedSum(0.3) if clip is None else clip
    return dp.Private(model, optimizer, plan_ or plan(), clip, **{"seed": 0, **more})


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
