"""Models trained on random halves of the data, and how well scores predict what they say of the queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from persample.influence.lds import bootstrap, spearman

from .tasks import EXAMPLES, TASKS, Batch, losses_fn, train_many

HALVES, SEEDS = 60, 4
CHECKPOINT = 2000  # the seed of the one model that every method sees


@dataclass(frozen=True)
class Retrained:
    """Data, one model trained on all of them, and what models trained on halves of them say of the queries."""

    train: Batch
    queries: Batch
    model: nn.Module
    decay: float  # of the weights, in training
    halves: Tensor  # (60, 1000) of zeros and ones
    outcomes: Tensor  # (60, 100): the queries' losses

    def lds(self, scores: Tensor) -> tuple[float, tuple[float, float]]:
        """The mean over queries of the rank correlation between predicted and actual losses; 95 % of a bootstrap."""
        predicted = -self.halves.double() @ scores.detach().cpu().double().t()
        actual = self.outcomes.double()
        interval = bootstrap(predicted, actual, 0.95, torch.Generator().manual_seed(0), draws=200)
        return float(spearman(predicted, actual).nanmean()), interval


def split(data: Batch, queries: int, seed: int) -> tuple[Batch, Batch]:
    """What is trained on, and what is asked."""
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))
    train, test = order[:EXAMPLES], order[EXAMPLES : EXAMPLES + queries]
    return (data[0][train], data[1][train]), (data[0][test], data[1][test])


def some_halves(count: int, seed: int) -> Tensor:
    """(count, 500): the places of random halves."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.stack([torch.randperm(EXAMPLES, generator=generator)[: EXAMPLES // 2] for _ in range(count)])


def retrain(name: str, halves: int = HALVES, seeds: int = SEEDS, seed: int = 0) -> Retrained:
    """All retrainings of a task."""
    task = TASKS[name]
    train, queries = split(task.data(), task.queries, seed)
    places, outcomes = some_halves(halves, seed), torch.zeros(halves, task.queries, dtype=torch.float64)
    for number in range(seeds):
        models = train_many(task, train, places, [1000 * (number + 1) + j for j in range(halves)])
        with torch.no_grad():
            outcomes += torch.stack([losses_fn(model, queries) for model in models])
    (model,) = train_many(task, train, torch.arange(EXAMPLES).unsqueeze(0), [CHECKPOINT])
    masks = torch.zeros(halves, EXAMPLES).scatter_(1, places, 1.0)
    return Retrained(train, queries, model, task.decay, masks, outcomes / seeds)
