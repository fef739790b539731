"""Timing: a method and the plain step take turns, so that a busy machine is busy for both."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from .contender import Contender


@dataclass(frozen=True)
class Effort:
    """How long a method is timed: for ``rounds``, or ``budget`` seconds and ``fewest`` rounds."""

    rounds: int
    budget: float
    fewest: int = 5
    warm_up: int = 2  # rounds that do not count


@dataclass(frozen=True)
class Timing:
    """Seconds, round by round."""

    mine: list[float]
    plain: list[float]

    def as_json(self) -> dict[str, Any]:
        """Times in ms and ratios to the plain step: best against best, and over the ratios within a round."""
        ratios = spread([a / b for a, b in zip(self.mine, self.plain, strict=True)])
        return {
            "rounds": len(self.mine),
            "ms": spread([1e3 * t for t in self.mine]),
            "plain_ms": spread([1e3 * t for t in self.plain]),
            "ratio": {**ratios, "min": _short(min(self.mine) / min(self.plain))},
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """The least, the median and the quartiles."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    found = {"min": min(values), "q1": low, "median": median(values), "q3": high}
    return {name: _short(value) for name, value in found.items()}


def _short(value: float) -> float:
    """Four digits are more than a timing is worth."""
    return float(f"{value:.4g}")


def take_turns(plain: Contender, mine: Callable[[], float], effort: Effort) -> Timing:
    """A plain step runs once before it is timed, so that it does not pay for caches that the method has filled."""
    timing = Timing([], [])
    for _ in range(effort.warm_up):
        whole_step(plain)
        mine()
    gc.collect()
    start = time.perf_counter()  # compilers may have taken long before
    for done in range(effort.rounds):
        if done >= effort.fewest and time.perf_counter() - start > effort.budget:
            break
        timing.mine.append(mine())
        whole_step(plain)
        timing.plain.append(whole_step(plain))
    return timing


def whole_step(contender: Contender) -> float:
    """Seconds from the forward pass to letting go of the result."""
    start = time.perf_counter()
    contender.step()
    return time.perf_counter() - start


def second_half(contender: Contender) -> float:
    """Seconds of what follows the forward pass."""
    losses = contender.forward()
    start = time.perf_counter()
    contender.after(losses)
    return time.perf_counter() - start
