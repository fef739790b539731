"""How well replays of a recorded run predict what the run would have been without some examples."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persample import influence as pi

from .tasks import EXAMPLES, digits

QUERIES, HIDDEN = 30, 32
STEPS, BATCH, LR, MOMENTUM, DECAY = 200, 64, 0.1, 0.9, 5e-3


class Digits:
    """An MLP on scikit-learn's digits: recorded once, and trained many times at once with other weights."""

    def __init__(self) -> None:
        images, labels = digits()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.x, self.y = images[order], labels[order]
        generator = torch.Generator().manual_seed(7)
        self.batches = [torch.randint(EXAMPLES, (BATCH,), generator=generator) for _ in range(STEPS)]
        self.queries = self.data(torch.arange(EXAMPLES, EXAMPLES + QUERIES))

    def data(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[ids], self.y[ids]

    @staticmethod
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10))

    @staticmethod
    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def scores(self, folder: Path) -> Tensor:
        """A recorded run, replayed."""
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        with pi.Recording(folder, model, optimizer, self.losses) as recording:
            for ids in self.batches:
                optimizer.zero_grad()
                recording.losses(self.data(ids), ids).mean().backward()
                optimizer.step()
        return pi.replay(folder, model, self.losses, self.queries, data=self.data, examples=EXAMPLES)

    def retrain(self, ids: Tensor, seed: int) -> Tensor:
        """The same run without the other examples, in batches of the same size: the losses of the queries."""
        weights = torch.zeros(EXAMPLES)
        weights[ids] = 1
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        for batch in self.batches:
            optimizer.zero_grad()
            (self.losses(model, self.data(batch)) * weights[batch]).mean().backward()
            optimizer.step()
        with torch.no_grad():
            return self.losses(model, self.queries)


def replayed(drops: tuple[float, ...] = (0.01, 0.05), subsets: int = 60) -> list[dict[str, Any]]:
    """How well replayed scores predict what training without some examples does."""
    digits = Digits()
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        scores = digits.scores(Path(folder))
        spent = time.process_time() - start
    rows = []
    for drop in drops:
        found = pi.lds(scores, digits.retrain, subsets=subsets, drop=drop)
        rows.append({"drop": drop, "lds": found.score, "interval": found.interval, "seconds": spent})
        print(f"replay, {drop:.0%} dropped: {found}", flush=True)
    return rows
