"""Models trained on random halves of the data, and how well scores predict what they say of the queries."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor, nn

from persample.influence.lds import bootstrap, spearman

from .tasks import EXAMPLES, TASKS, Batch, losses_fn, train_many

HALVES, SEEDS = 60, 4
WORKERS = 2
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


def losses_of_halves(name: str, halves: int, seed: int, number: int) -> list[list[float]]:
    """In a process of its own: the queries' losses of one model for every half, (halves, queries)."""
    torch.set_num_threads(1)
    task = TASKS[name]
    train, queries = split(task.data(), task.queries, seed)
    models = train_many(task, train, some_halves(halves, seed), [1000 * (number + 1) + j for j in range(halves)])
    with torch.no_grad():
        return [losses_fn(model, queries).tolist() for model in models]


def retrain(name: str, halves: int = HALVES, seeds: int = SEEDS, seed: int = 0) -> Retrained:
    """All retrainings of a task, in two processes of one thread each."""
    task = TASKS[name]
    train, queries = split(task.data(), task.queries, seed)
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(losses_of_halves, name, halves, seed, number) for number in range(seeds)]
        (model,) = train_many(task, train, torch.arange(EXAMPLES).unsqueeze(0), [CHECKPOINT])
        outcomes = torch.tensor([w.result() for w in waiting], dtype=torch.float64).mean(0)
    masks = torch.zeros(halves, EXAMPLES).scatter_(1, some_halves(halves, seed), 1.0)
    return Retrained(train, queries, model, task.decay, masks, outcomes)
