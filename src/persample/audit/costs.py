"""What per-sample gradients cost beside a plain step: they take turns, so that a busy machine is busy for both."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .._errors import PerformanceWarning
from ..shortcuts import clipped_sum, norms
from ..testing.compare import by_backward, definition, hides_ops
from ..verbs import grad
from .problem import Problem

Step = Callable[[Tensor, nn.Module], Any]  # what follows the forward pass
PLAIN = "plain step"
LOOP = "one backward per sample"
_WARM_UP = 2
_FEWEST = 3  # rounds, however long they take
_BUDGET = 20.0  # seconds after which no further round is begun


def _plain(losses: Tensor, model: nn.Module) -> Any:
    tensors = [p for p in model.parameters() if p.requires_grad]
    hidden = _HIDDEN.get(model)
    if hidden is None:  # found out while warming up, as it takes time
        hidden = _HIDDEN[model] = hides_ops(losses)
    if hidden:
        return by_backward(losses.sum(), tensors, [*tensors], retain_graph=False)
    return torch.autograd.grad(losses.sum(), tensors, allow_unused=True)


_HIDDEN: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # models whose graphs hold reentrant checkpoints


STEPS: dict[str, Step] = {
    PLAIN: _plain,
    "norms": norms,
    "clipped_sum": partial(clipped_sum, max_norm=1.0, nonfinite="drop"),
    "grad": grad,
}


@dataclass(frozen=True, slots=True)
class Cost:
    """One way to take a step: forward pass, backward and what is computed from it."""

    name: str
    ms: float  # the median
    ratio: float  # to a plain step, the median over rounds
    low: float  # quartiles of the ratio
    high: float
    rounds: int
    bytes_above: int | None = None  # how far memory rises above what the forward pass holds


def measure(problem: Problem, repeats: int) -> tuple[Cost, ...]:
    """Every step, ``repeats`` times in turns; the loop over samples once."""
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    with problem.untouched(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        start = time.perf_counter()
        for _ in range(_WARM_UP):
            for step in STEPS.values():
                _seconds(step, problem)
        gc.collect()
        for done in range(repeats):
            if done >= _FEWEST and time.perf_counter() - start > _BUDGET:
                break
            for name, step in STEPS.items():
                times[name].append(_seconds(step, problem))
        times[LOOP] = [_seconds(definition, problem)]
    return tuple(_cost(name, mine, times[PLAIN]) for name, mine in times.items())


def _seconds(step: Step, problem: Problem) -> float:
    """Seconds from the forward pass to the release of the result."""
    start = time.perf_counter()
    step(problem.once(), problem.model)
    _wait(problem)
    return time.perf_counter() - start


def _wait(problem: Problem) -> None:
    """Wait for devices that work on after Python has returned."""
    if any(p.device.type != "cpu" for p in problem.model.parameters()):
        torch.accelerator.synchronize()


def _cost(name: str, mine: Sequence[float], plain: Sequence[float]) -> Cost:
    ratios = [a / b for a, b in zip(mine, plain, strict=False)] if len(mine) > 1 else [mine[0] / median(plain)]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
    return Cost(name, 1e3 * median(mine), median(ratios), low, high, len(mine))
