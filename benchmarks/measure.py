"""Timing: the contenders take turns in one run, so that a busy machine is busy for all of them."""

from __future__ import annotations

import gc
import random
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

import persample as ps
from persample.graph.plan import plan
from persample.graph.roots import Roots

from .environment import Others
from .methods import METHODS, After, Method
from .workloads import Task, Workload


@dataclass(frozen=True)
class Effort:
    """How long a workload is timed: for ``rounds``, or ``budget`` seconds and ``fewest`` rounds."""

    rounds: int
    budget: float
    fewest: int = 3
    warm_up: int = 2  # rounds that do not count


@dataclass(frozen=True)
class Timing:
    """One workload's times in seconds: ``seconds[method][round]``."""

    workload: Workload
    parameters: int
    nodes: int
    probed: int
    seconds: Mapping[str, list[float]]
    plain: Mapping[str, list[float]]  # of the plain step that took turns with the method
    others: float | None = None  # cores that other programs kept busy meanwhile
    warnings: list[str] = field(default_factory=list)

    def ratio(self, method: str) -> dict[str, float]:
        """To the plain step: best against best, and the median over rounds of the ratio within a round."""
        mine, plain = self.seconds[method], self.plain[method]
        return {
            "min": min(mine) / min(plain),
            "median": median(a / b for a, b in zip(mine, plain, strict=True)),
        }

    def as_json(self) -> dict[str, Any]:
        w = self.workload
        return {
            "workload": w.name,
            "title": w.title,
            "group": w.group,
            "batch": w.batch,
            "parameters": self.parameters,
            "graph_nodes": self.nodes,
            "probed_nodes": self.probed,
            "rounds": len(self.seconds["plain"]),
            "others": self.others,
            "methods": {
                name: {
                    "ms": {"min": 1e3 * min(times), "median": 1e3 * median(times)},
                    "ratio": self.ratio(name),
                    "seconds": times,
                }
                for name, times in self.seconds.items()
            },
            "warnings": self.warnings,
        }


def measure(workload: Workload, effort: Effort) -> Timing:
    """Time every method on a workload."""
    task = workload.build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ps.PerformanceWarning)
        check(task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ps.PerformanceWarning)  # reported once, above
        others = Others()
        seconds, plain = _all(task, effort)
        busy = others.cores()
    found = plan(Roots.of_losses(task.losses()), list(task.params().values()))
    return Timing(
        workload,
        sum(p.numel() for p in task.params().values()),
        len(found.tape.order),
        len(found.map.probed),
        seconds,
        plain,
        busy,
        sorted({str(w.message) for w in caught if issubclass(w.category, ps.PerformanceWarning)}),
    )


def _all(task: Task, effort: Effort) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Those that write all gradients out take turns with the plain step among themselves."""
    seconds: dict[str, list[float]] = {}
    plain: dict[str, list[float]] = {}
    for heavy in (True, False):
        methods = [m for m in METHODS.values() if m.writes_out == heavy or m.name == "plain"]
        found = _take_turns(task, effort, methods)
        seconds.update(found)
        plain.update(dict.fromkeys(found, found["plain"]))
    return seconds, plain


def _take_turns(task: Task, effort: Effort, methods: Sequence[Method]) -> dict[str, list[float]]:
    start = time.perf_counter()
    contenders = [(method, method.prepare(task)) for method in methods]
    seconds: dict[str, list[float]] = {method.name: [] for method, _ in contenders}
    for _ in range(effort.warm_up):
        for method, after in contenders:
            _time(task, method, after)
    gc.collect()
    shuffle = random.Random(0).shuffle  # nobody always runs after the one that leaves the caches cold
    for done in range(effort.rounds):
        if done >= effort.fewest and time.perf_counter() - start > effort.budget:
            break
        shuffle(contenders)
        for method, after in contenders:
            seconds[method.name].append(_time(task, method, after))
    return seconds


def _time(task: Task, method: Method, after: After) -> float:
    """Seconds for one step; letting go of the result is part of it."""
    if method.with_forward:
        start = time.perf_counter()
        after(task.losses())
        return time.perf_counter() - start
    losses = task.losses()
    start = time.perf_counter()
    after(losses)
    return time.perf_counter() - start


def check(task: Task) -> None:
    """Per-sample gradients must add up to the ordinary gradient: wrong answers are not worth timing."""
    params = task.params()
    wanted = torch.autograd.grad(task.losses().sum(), list(params.values()))
    found = ps.grad(task.losses(), task.model)
    for (name, rows), want in zip(found.items(), wanted, strict=True):
        error = float((rows.sum(0) - want).norm() / want.norm().clamp(min=1e-6))
        if not error < 1e-3:
            raise ArithmeticError(f"per-sample gradients of {name!r} do not add up: relative error {error:.1e}")
