"""How an index grows: time and bytes against examples, parameters and ranks."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from persample import influence as pi

from ..processes import ROOT
from ..workloads import WORKLOADS
from .costs import SKETCH, losses_of, plain_step, seconds
from .tasks import TASKS, losses_fn

COUNTS, BATCH = (1_000, 10_000, 100_000, 1_000_000), 1000
WIDTHS, RANKS = (32, 64, 128, 256, 512), (4, 8, 16, 32, 64)
STEPS = 6


class Repeated(Sequence[Any]):
    """The same thousand examples, again and again."""

    def __init__(self, batch: Any, times: int) -> None:
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return self.times

    def __getitem__(self, number: Any) -> Any:
        return self.batch


def by_examples(count: int) -> dict[str, Any]:
    """An MLP on digits, float16: a build, a fit by stored rows, and a query of ten."""
    task = TASKS["mlp"]
    x, y = (t[:BATCH] for t in task.data())
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=ROOT / "build"))
    try:
        index = pi.Index(folder, task.model(0), losses_fn, sketch=SKETCH, dtype="float16")
        built = seconds(lambda: index.build(Repeated((x, y), count // BATCH), progress=False))
        fitted = seconds(lambda: index.fit(pi.Shampoo()))
        start, wall = time.process_time(), time.perf_counter()
        index.query((x[:10], y[:10]), k=10)
        asked, waited = time.process_time() - start, time.perf_counter() - wall
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    finally:
        shutil.rmtree(folder)
    return {"examples": count, "build": built, "fit": fitted, "query": asked, "query_wall": waited, "bytes": size}


def of_gpt(name: str, rank: int) -> dict[str, Any]:
    """A GPT: a batch that is sketched beside a plain step, and what is kept of an example."""
    task, sketch = WORKLOADS[name].build(), pi.Blocks(rank, rank, seed=0)
    losses_fn = losses_of(task)
    with tempfile.TemporaryDirectory() as folder:
        index = pi.Index(folder, task.model, losses_fn, sketch=sketch)
        subject = index.subject
        plain, own = list[float](), list[float]()
        for _ in range(STEPS):
            plain.append(seconds(lambda: plain_step(task)))
            task.model.zero_grad(set_to_none=True)
            own.append(seconds(lambda: subject.rows(task.inputs).line))
        row = 4 * sum(n * m for n, m in subject.blocks.values())
    tokens = task.inputs[0][:, 1:].numel()
    return {
        "workload": name,
        "parameters": sum(p.numel() for p in task.params().values()),
        "rank": rank,
        "ratio": sorted(a / b for a, b in zip(own[1:], plain[1:], strict=True))[len(own) // 2 - 1],
        "plain": min(plain),
        "seconds": min(own),
        "tokens": tokens,
        "examples": len(task.inputs[0]),
        "bytes_per_example": row,
    }


def measured(counts: Sequence[int] = COUNTS) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"examples": [], "parameters": [], "ranks": []}
    for count in counts:
        found["examples"].append(by_examples(count))
        print(found["examples"][-1], flush=True)
    for width in WIDTHS:
        found["parameters"].append(of_gpt(f"width-{width}", 16))
        print(found["parameters"][-1], flush=True)
    for rank in RANKS:
        found["ranks"].append(of_gpt("gpt", rank))
        print(found["ranks"][-1], flush=True)
    return found
