"""The gradient noise scale tr(Σ) / |G|² (McCandlish et al. 2018, arXiv 1812.06162): how large a batch pays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """Of the gradients of single samples: the trace of their covariance, and the square of their mean's norm."""

    trace: float
    square: float


def moments(norms: Tensor, mean: Mapping[str, Tensor], population: int) -> Moments:
    """Unbiased estimates from a batch drawn without replacement; exact if the batch is the whole population."""
    n = len(norms)
    if n < 2:
        raise ValueError(f"a variance needs at least 2 samples, and the batch has {n}")
    square = sum(float(g.double().square().sum()) for g in mean.values())
    trace = (float(norms.double().square().sum()) - n * square) / (n - 1)
    return Moments(trace, square - trace * (1 / n - 1 / population))


def noise_scale(moments: Sequence[Moments]) -> float:
    """The ratio of the mean moments, not the mean ratio, which would be biased; NaN where noise hides the gradient."""
    trace, square = (sum(values) / len(moments) for values in zip(*moments, strict=True))
    return trace / square if square > 0 else math.nan
