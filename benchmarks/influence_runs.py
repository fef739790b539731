"""Values in a run and replays: what they cost, and how well they predict. Writes JSON.

``python -m benchmarks.influence_runs build/influence-runs.json [--only in-run|replay]``
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persample import influence as pi

from .workloads import MAIN, WORKLOADS

ROUNDS, WARM_UP = 9, 2
EXAMPLES, QUERIES, HIDDEN = 1000, 30, 32
STEPS, BATCH, LR, MOMENTUM, DECAY = 200, 64, 0.1, 0.9, 5e-3


def seconds(step: Callable[[], Any]) -> float:
    """CPU time of this process, so that others on the machine count little."""
    start = time.process_time()
    step()
    return time.process_time() - start


def in_run(name: str, every: int) -> dict[str, Any]:
    """A step with values beside a plain step of the same training batch; validation is an eighth as large."""
    workload = WORKLOADS[name]
    task = workload.build()
    batch = len(task.inputs[0])
    validation = workload.build(max(1, batch // 8)).inputs
    run = pi.InRun(task.model, validation, lambda model, inputs: task.losses_fn(model, *inputs), lr=0.1, every=every)
    ids = torch.arange(batch)

    def plain() -> None:
        task.model.zero_grad()
        task.losses().mean().backward()

    def valued() -> None:
        task.model.zero_grad()
        run.backward(task.losses(), ids)

    ratios = []
    for _ in range(ROUNDS):  # one round is as many steps as one validation gradient serves
        base, own = [], []
        for _ in range(every):
            base.append(seconds(plain))
            own.append(seconds(valued))
        ratios.append(sum(own) / sum(base))
    counted = ratios[WARM_UP:]
    return {"workload": name, "every": every, "batch": batch, "ratio": median(counted), "least": min(counted)}


class Digits:
    """An MLP on scikit-learn's digits: recorded once, and trained many times at once with other weights."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        images = torch.tensor(x / 16, dtype=torch.float32)
        images, labels = images - images.mean(0), torch.tensor(y)
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
        rows.append({"drop": drop, "lds": found.score, "interval": found.interval, "replay_seconds": spent})
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--only", choices=["in-run", "replay"])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"torch": torch.__version__}
    if chosen.only != "in-run":
        found["replay"] = replayed()
        print(*found["replay"], sep="\n", flush=True)
    if chosen.only != "replay":
        found["in_run"] = []
        for name in MAIN:
            for every in (1, 4):
                found["in_run"].append(in_run(name, every))
                print(found["in_run"][-1], flush=True)
    chosen.path.parent.mkdir(parents=True, exist_ok=True)
    chosen.path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
