"""Numbers that change from step to step by a public schedule: factors, each for an equal share of the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

_LEVELS = 16


def linear(first: float, last: float, levels: int = _LEVELS) -> tuple[float, ...]:
    """Factors from the first to the last, in equal differences.

    >>> from persample.dp import schedules
    >>> schedules.linear(1.0, 0.5, levels=3)
    (1.0, 0.75, 0.5)

    Args:
        first: the factor at the beginning.
        last: the factor at the end.
        levels: in how many stages; each of them has an equal share of the steps, and costs as much time to account for.
    """
    return tuple(first + (last - first) * share for share in _shares(first, last, levels))


def exponential(first: float, last: float, levels: int = _LEVELS) -> tuple[float, ...]:
    """Factors from the first to the last, in equal ratios.

    >>> from persample.dp import schedules
    >>> schedules.exponential(1.0, 0.25, levels=3)
    (1.0, 0.5, 0.25)

    Args:
        first: the factor at the beginning.
        last: the factor at the end.
        levels: as for `linear`.
    """
    return tuple(first * (last / first) ** share for share in _shares(first, last, levels))


def cosine(first: float, last: float, levels: int = _LEVELS) -> tuple[float, ...]:
    """Factors from the first to the last along half of a cosine: slow at both ends.

    >>> from persample.dp import schedules
    >>> schedules.cosine(1.0, 0.5, levels=3)
    (1.0, 0.75, 0.5)

    Args:
        first: the factor at the beginning.
        last: the factor at the end.
        levels: as for `linear`.
    """
    middle, half = (first + last) / 2, (first - last) / 2
    return tuple(middle + half * math.cos(math.pi * share) for share in _shares(first, last, levels))


def _shares(first: float, last: float, levels: int) -> list[float]:
    """How far each level is on the way."""
    checked([first, last], "first and last")
    if not isinstance(levels, int) or isinstance(levels, bool) or levels < 2:
        raise ValueError(f"levels must be an integer of at least 2, not {levels!r}")
    return [level / (levels - 1) for level in range(levels)]


def checked(factors: Any, name: str) -> tuple[float, ...]:
    """The factors, if they are some."""
    if isinstance(factors, str) or not isinstance(factors, Iterable):
        raise TypeError(f"{name} must be factors, each for an equal share of the steps, not {factors!r}")
    found = tuple(factors)
    wrong = [f for f in found if not isinstance(f, (int, float)) or isinstance(f, bool) or not 0 < f < math.inf]
    if wrong or not found:
        raise ValueError(f"{name} must be positive and finite numbers, and one at least, not {wrong or found!r}")
    return tuple(map(float, found))


def check_goes_with(sampling: str, mechanism: str, *, solves_steps: bool) -> None:
    """Refuse a schedule of noise where its accounting is not known, or its length is not."""
    if sampling != "poisson" or mechanism != "gaussian":
        raise ValueError(
            f"noise_schedule is accounted for with sampling='poisson' and mechanism='gaussian', not with {sampling!r} "
            f"and {mechanism!r}: leave it out, or use those"
        )
    if solves_steps:
        raise ValueError("each factor of noise_schedule is for a share of the steps: give steps or epochs")


def factor_at(factors: Sequence[float], step: int, steps: int) -> float:
    """The factor of a step, counted from 0, of so many."""
    return factors[min(step * len(factors) // steps, len(factors) - 1)]


def counts(factors: Sequence[float], done: int, steps: int) -> dict[float, int]:
    """How many of the first ``done`` of so many steps have each factor."""
    found: dict[float, int] = {}
    for place, factor in enumerate(factors):
        first, end = (-(-at * steps // len(factors)) for at in (place, place + 1))
        found[factor] = found.get(factor, 0) + max(min(end, done) - first, 0)
    return {factor: count for factor, count in found.items() if count}


def expected_error(factors: Sequence[float], steps: int, momentum: float) -> float:
    """The root of the mean squared error of all sums so far, of noise with these standard deviations.

    Noise of step s is in the sum of step s + j with the weight 1 + μ + … + μ^j that the optimizer's momentum gives it.
    """
    weights = np.cumsum(np.cumsum(momentum ** np.arange(steps)) ** 2)[::-1]
    noise = np.array([factor_at(factors, step, steps) for step in range(steps)])
    return float(np.sqrt((weights * noise**2).sum() / steps))
