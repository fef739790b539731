"""How many bands: more of them correlate noise over more steps, and sample from smaller parts of the data."""

from __future__ import annotations

from collections.abc import Callable

from .encoders import banded

_MOST = 64  # as each keeps as many numbers as there are parameters
_RISEN = 0.05  # above the least: more bands would only be worse
_WORTH = 0.02  # of the error is not worth twice the memory


def best_bands(steps: int, most: int, momentum: float, noise_for: Callable[[int], float | None]) -> int:
    """The fewest bands, of powers of two, whose expected error is within 2% of the least.

    ``noise_for`` says which noise multiplier keeps the promise with so many bands, if any does. It rises with bands,
    the faster the more there are, so that errors fall first and then rise.
    """
    errors: dict[int, float] = {}
    bands = 1
    while bands <= min(most, steps, _MOST):
        noise = noise_for(bands)
        if noise is not None:
            errors[bands] = noise * banded(bands, steps, momentum).error
            if errors[bands] > (1 + _RISEN) * min(errors.values()):
                break
        bands *= 2
    least = min(errors.values(), default=0.0)
    return next((bands for bands, error in errors.items() if error <= least * (1 + _WORTH)), 1)
