"""Searches on the accountant: the least noise, and the most steps, that keep a promise."""

from __future__ import annotations

import math
from collections.abc import Callable

_TRIES = 60
_MOST_NOISE = 2.0**16  # beyond that, a step's loss is lost in the accountants' rounding errors
LEAST_NOISE = 2.0**-5  # with less no promise is worth the name, and more precision would cost minutes
CLOSE = 1e-3  # how close to the best noise is close enough, relatively


def least_noise(epsilon_of: Callable[[float], float], epsilon: float) -> float | None:
    """The least noise multiplier with ``epsilon_of(noise) <= epsilon``, within 0.1% above it; None beyond 65536.

    `LEAST_NOISE` where half of it would do: less is not looked for.

    ``epsilon_of`` must not rise with the noise.
    """
    low, high = 0.0, 1.0
    while epsilon_of(high) > epsilon:
        low, high = high, high * 2
        if high > _MOST_NOISE:
            return None
    while low == 0.0:
        if epsilon_of(high / 2) > epsilon:
            low = high / 2
        elif high <= LEAST_NOISE:
            return high
        else:
            high /= 2
    for _ in range(_TRIES):
        if high <= low * (1 + CLOSE):
            break
        middle = _between(low, high, epsilon_of, epsilon)
        if epsilon_of(middle) <= epsilon:
            high = middle
        else:
            low = middle
    return high


def _between(low: float, high: float, epsilon_of: Callable[[float], float], epsilon: float) -> float:
    """Where a power law through both ends meets epsilon, kept off the ends so that the interval shrinks."""
    above, below = epsilon_of(low), epsilon_of(high)
    share = 0.5
    if math.isfinite(above) and below > 0:
        share = math.log(above / epsilon) / math.log(above / below)
    width = math.log(high / low)
    # A little beyond the meeting point, towards more noise: the next interval is then short.
    return low * math.exp(width * min(max(share + 0.3 * CLOSE / width, 0.05), 0.95))


def most_steps(epsilon_of: Callable[[int], float], epsilon: float, limit: int) -> int:
    """The largest number of steps up to ``limit`` with ``epsilon_of(steps) <= epsilon``, within 0.1% below it.

    ``epsilon_of`` must not fall with the steps. 0 if one step is too many.
    """
    good, bad = 0, 1
    while epsilon_of(bad) <= epsilon:
        good, bad = bad, bad * 4
        if good >= limit:
            return limit
    bad = min(bad, limit + 1)
    while bad - good > max(1, good * CLOSE):
        middle = min(max(round(_root(good, bad, epsilon_of, epsilon)), good + 1), bad - 1)
        if epsilon_of(middle) <= epsilon:
            good = middle
        else:
            bad = middle
    return good


def _root(good: int, bad: int, epsilon_of: Callable[[int], float], epsilon: float) -> float:
    """Where a power law through both ends meets epsilon, a little below."""
    below, above = epsilon_of(good), epsilon_of(bad)
    share = 0.5
    if math.isfinite(above) and below > 0:
        share = math.log(epsilon / below) / math.log(above / below)
    width = math.log(bad / good)
    return good * math.exp(width * min(max(share - 0.3 * CLOSE / width, 0.05), 0.95))
