"""What an index costs: building, fitting and asking, in CPU time of one thread beside plain steps; and memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from persample import influence as pi

from .. import memory
from ..processes import forked
from ..workloads import WORKLOADS, Task

COSTLY = ("mlp", "resnet", "gpt")
BATCHES, WARM_UP, REPEATS = 9, 2, 4
CHUNK = 2**24
SKETCH = pi.Blocks(16, 16, seed=0)


def seconds(step: Callable[[], Any]) -> float:
    """CPU time of this process, so that others on the machine count little."""
    start = time.process_time()
    step()
    return time.process_time() - start


def losses_of(task: Task) -> Callable[[Any, Any], Tensor]:
    return lambda model, batch: task.losses_fn(model, *batch)


def plain_step(task: Task) -> None:
    task.model.zero_grad(set_to_none=True)
    task.losses().mean().backward()


class Between(Sequence[Any]):
    """A loader that takes a plain step before it gives a batch: what lies between two steps is the time of a batch."""

    def __init__(self, task: Task, batches: int) -> None:
        self.task, self.batches = task, batches
        self.given: float | None = None
        self.plain, self.own = list[float](), list[float]()

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, number: Any) -> Any:
        if number >= self.batches:
            raise IndexError(number)  # which ends a loop
        if self.given is not None:
            self.own.append(time.process_time() - self.given)
        plain_step(self.task)  # which pays for what was in caches before
        self.plain.append(seconds(lambda: plain_step(self.task)))
        self.task.model.zero_grad(set_to_none=True)
        self.given = time.process_time()
        return self.task.inputs

    def ratio(self) -> dict[str, float]:
        """Of a batch to a plain step, by medians and by sums, which hold the writing of chunks as well."""
        own, plain = self.own[WARM_UP:], self.plain[WARM_UP : WARM_UP + len(self.own[WARM_UP:])]
        each = [a / b for a, b in zip(own, plain, strict=True)]
        return {"ratio": median(each), "with_writing": sum(own) / sum(plain), "plain_ms": 1e3 * median(plain)}


def build(name: str) -> dict[str, Any]:
    """Every batch of a build beside a plain step, and the same for a pass of fitting with drawn labels."""
    torch.set_num_threads(1)
    task, found = WORKLOADS[name].build(), dict[str, Any]()
    losses_fn, loader = losses_of(task), Between(task, BATCHES)
    with tempfile.TemporaryDirectory() as folder:
        index = pi.Index(folder, task.model, losses_fn, sketch=SKETCH)
        index.build(loader, chunk_bytes=CHUNK, progress=False)
        rows, widths = len(index), index.folder.plan.encoding.row_bytes
        found |= {"workload": name, "bytes_per_example": widths, "build": loader.ratio()}
        passes = Between(task, BATCHES)
        index.fit(pi.Shampoo(labels="sampled"), passes, sample_losses_fn=losses_fn, progress=False)
        found["fit, drawn labels"] = passes.ratio()
        plain = median(loader.plain)
        stored = min(seconds(lambda: index.fit(pi.Shampoo())) for _ in range(3))
        found["fit, stored rows"] = {"ratio": stored / 2 / (plain * rows / len(task.inputs[0]))}
        found["query"] = query(index, task, plain)
    return found


def query(index: pi.Index, task: Task, plain: float) -> dict[str, float]:
    """One question beside one step for its gradients and one read of the index."""
    index.fit(None)
    files = sorted((index.folder.path / "chunks").iterdir())
    asked, read, step = list[float](), list[float](), list[float]()
    for _ in range(REPEATS):
        asked.append(seconds(lambda: index.query(task.inputs, k=10)))
        read.append(seconds(lambda: [path.read_bytes() for path in files]))
        step.append(seconds(lambda: plain_step(task)))
    task.model.zero_grad(set_to_none=True)
    parts = median(step) + median(read)
    return {"seconds": median(asked), "step": median(step), "read": median(read), "ratio": median(asked) / parts}


def in_run(name: str, every: int) -> dict[str, Any]:
    """A step with values beside a plain step of the same training batch; validation is an eighth as large."""
    torch.set_num_threads(1)
    task = WORKLOADS[name].build()
    batch = len(task.inputs[0])
    validation = WORKLOADS[name].build(max(1, batch // 8)).inputs
    run, ids = pi.InRun(task.model, validation, losses_of(task), lr=0.1, every=every), torch.arange(batch)

    def valued() -> None:
        task.model.zero_grad(set_to_none=True)
        run.backward(task.losses(), ids)

    ratios = []
    for _ in range(WARM_UP + REPEATS):  # one round is as many steps as one validation gradient serves
        base, own = 0.0, 0.0
        for _ in range(every):
            plain_step(task)
            base += seconds(lambda: plain_step(task))
            own += seconds(valued)
        ratios.append(own / base)
    return {"workload": name, "every": every, "ratio": median(ratios[WARM_UP:])}


def peak_of_step(name: str) -> int:
    """In a process of its own: how far a plain step raises memory."""
    torch.set_num_threads(1)
    task = _warm(name)
    return memory.risen(lambda: plain_step(task))


def peak_of_build(name: str, chunk: int) -> int:
    """In a process of its own: how far a build raises it."""
    torch.set_num_threads(1)
    task = _warm(name)
    with tempfile.TemporaryDirectory() as folder:
        index = pi.Index(Path(folder) / "i", task.model, losses_of(task), sketch=SKETCH)
        row = sum(n * m for n, m in index.subject.blocks.values()) * 4
        batches = max(2, 3 * chunk // (row * len(task.inputs[0])))
        return memory.risen(lambda: index.build([task.inputs] * batches, chunk_bytes=chunk, progress=False))


def _warm(name: str) -> Task:
    """Kernels and sketching matrices are there before memory is looked at."""
    memory._return_freed_memory()
    task, few = WORKLOADS[name].build(), WORKLOADS[name].build(batch=2)
    with tempfile.TemporaryDirectory() as folder:
        index = pi.Index(folder, few.model, losses_of(few), sketch=SKETCH)
        index.build([few.inputs] * 2, progress=False)
    plain_step(few)
    return task


def of_workload(name: str) -> dict[str, Any]:
    """All of it; every figure from a process of its own."""
    found = forked(build, name)
    found["in_run"] = [forked(in_run, name, every) for every in (1, 4)]
    step, whole = forked(peak_of_step, name), forked(peak_of_build, name, CHUNK)
    found["memory"] = {"plain": step, "build": whole, "chunk": CHUNK, "chunks_above": (whole - step) / CHUNK}
    short = {key: round(found[key]["ratio"], 2) for key in ("build", "fit, drawn labels", "fit, stored rows", "query")}
    inside = {f"InRun every {row['every']}": round(row["ratio"], 2) for row in found["in_run"]}
    print(f"{name}: {short | inside}, {found['memory']['chunks_above']:.2f} chunks above a step", flush=True)
    return found
