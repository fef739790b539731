"""`python -m benchmarks.second`: what derivatives of per-sample gradients cost (``create_graph=True``), as JSON.

Every way computes the sum of the squared norms of some gradients, and its derivative with respect to the weights, from
the forward pass on. ``double`` is PyTorch's own double backward of the summed loss: one gradient for the whole batch.
The others have one for every sample: verbs of this package, and ``torch.func``. Attention runs without the kernel whose
backward PyTorch cannot differentiate. All ways take turns on one thread, and CPU time is what counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import persample as ps

from . import environment
from .contender import MAX_NORM
from .peers import rows_by_vmap
from .processes import forked
from .workloads import MAIN, WORKLOADS, Task

Way = Callable[[Task], Callable[[], Tensor]]


def _squares(gradients: Iterable[Tensor]) -> Tensor:
    return torch.stack([g.square().sum() for g in gradients]).sum()


def _step(task: Task) -> Callable[[], Tensor]:
    """No penalty at all."""
    return lambda: task.losses().sum()


def _double(task: Task) -> Callable[[], Tensor]:
    """That of the summed loss."""
    params = list(task.model.parameters())
    return lambda: _squares(torch.autograd.grad(task.losses().sum(), params, create_graph=True))


def _norms(task: Task) -> Callable[[], Tensor]:
    return lambda: ps.norms(task.losses(), task.model, create_graph=True).square().sum()


def _grad(task: Task) -> Callable[[], Tensor]:
    return lambda: _squares(ps.grad(task.losses(), task.model, create_graph=True).values())


def _clipped_sum(task: Task) -> Callable[[], Tensor]:
    return lambda: _squares(ps.clipped_sum(task.losses(), task.model, MAX_NORM, create_graph=True).values())


def _vmap(task: Task) -> Callable[[], Tensor]:
    rows, params = rows_by_vmap(task)
    return lambda: _squares(rows(params).values())


WAYS: dict[str, Way] = {
    "step": _step,
    "double": _double,
    "norms": _norms,
    "grad": _grad,
    "clipped_sum": _clipped_sum,
    "torch.func": _vmap,
}


def seconds(task: Task, penalty: Callable[[], Tensor]) -> float:
    """Of CPU time, from the forward pass to the derivatives."""
    start = time.process_time()
    penalty().backward()
    taken = time.process_time() - start
    task.model.zero_grad(set_to_none=True)
    return taken


def measured(name: str, rounds: int, budget: float, ways: Sequence[str], batch: int | None) -> dict[str, Any]:
    """Times in ms by way, and the ratios to PyTorch's own double backward within a round."""
    torch.set_num_threads(1)
    task, others, found = WORKLOADS[name].build(batch), environment.Others(), {way: list[float]() for way in ways}
    with sdpa_kernel(SDPBackend.MATH):
        penalties = {way: WAYS[way](task) for way in ways}
        for penalty in penalties.values():
            seconds(task, penalty)
        start = time.perf_counter()
        for done in range(rounds):
            if done > 2 and time.perf_counter() - start > budget:
                break
            for way in ways:
                found[way].append(seconds(task, penalties[way]))
    ratios = {way: median([a / b for a, b in zip(found[way], found["double"], strict=True)]) for way in ways}
    return {
        "workload": name,
        "rounds": len(found["double"]),
        "busy_cores_of_others": others.cores(),
        "ms": {way: round(1e3 * median(times), 2) for way, times in found.items()},
        "over_double": {way: round(ratio, 3) for way, ratio in ratios.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=MAIN)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for one workload")
    parser.add_argument("--batch", type=int, help="samples, in place of each workload's own number")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(arguments)
    ways = list(dict.fromkeys(["double", *options.ways]))
    results = []
    for name in options.workloads:
        row = forked(measured, name, options.rounds, options.budget, ways, options.batch)
        print(json.dumps(row), flush=True)
        results.append(row)
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": environment.describe(), "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
