"""Moments of gradients over the samples, element by element: the second moment and the variance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..factors import Factor
from ..kernels.norms import wide
from .base import Call, Reduction


class SecondMoment(Reduction):
    """The mean over samples of the squared gradient, element by element; NaN for no samples."""

    over_ranks = True

    def start(self, call: Call) -> None:
        self._call = call
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, factor: Factor) -> None:
        self._sums[name] = factor.sum_squares(None, self._call.space)

    def result(self) -> Any:
        return _pack(self._call, self._call.over_ranks(self._sums, real=True), self._call.samples)


class Variance(Reduction):
    """The variance over samples of the gradient, element by element, as ``torch.var`` gives it.

    Args:
        correction: the sum of squares is divided by B - correction; NaN where that is not positive.
    """

    passes = 2
    over_ranks = True

    def __init__(self, correction: int = 1) -> None:
        self.correction = correction

    def start(self, call: Call) -> None:
        self._call = call
        self._means: dict[str, Tensor] = {}  # over the samples of this process
        self._squares: dict[str, Tensor] = {}  # sums of squared distances from them

    def add(self, name: str, factor: Factor) -> None:
        call = self._call
        mean = factor.weighted_sum((call.zeros(call.batch) + 1 / call.batch).to(factor.device), call.space)
        self._squares[name] = factor.sum_squares(mean.detach(), call.space)  # the same about any center
        if call.ranks is not None:
            self._means[name] = mean

    def result(self) -> Any:
        call = self._call
        squares = call.over_ranks(self._squares_about_global_mean(), real=True)
        return _pack(call, squares, max(call.samples - self.correction, 0))

    def _squares_about_global_mean(self) -> dict[str, Tensor]:
        """Sums of squared distances of this process's samples from the mean over all ranks' samples."""
        call, count = self._call, self._call.samples
        if call.ranks is None:
            return self._squares
        squares = self._squares
        for name, total in call.over_ranks({name: mean * call.batch for name, mean in self._means.items()}).items():
            mean = self._means.get(name, torch.zeros_like(total))
            shift = (mean - total / max(count, 1)).abs().square()
            squares[name] = call.batch * shift + squares.get(name, torch.zeros_like(shift))
        return squares


def _pack(call: Call, sums: Mapping[str, Tensor], divisor: int) -> Any:
    """Sums divided by ``divisor``, like each parameter: real, in float32 or wider; zeros if there is no sum."""
    return call.pack(
        {
            name: (sums[name] / divisor).to(wide(p.dtype).to_real())
            if name in sums
            else torch.zeros(p.shape, dtype=wide(p.dtype).to_real(), device=p.device) / divisor
            for name, p in call.params.items()
        }
    )
