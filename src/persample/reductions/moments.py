"""Elementwise moments over the samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..factors import Factor
from ..kernels.norms import wide
from .base import Call, Reduction


class SecondMoment(Reduction):
    """The mean over samples of the squared gradient, element by element; NaN for no samples."""

    def start(self, call: Call) -> None:
        self._call = call
        self._found: dict[str, Tensor] = {}

    def add(self, name: str, factor: Factor) -> None:
        self._found[name] = factor.sum_squares(None, self._call.space) / self._call.batch

    def result(self) -> Any:
        return _pack(self._call, self._found, self._call.batch)


class Variance(Reduction):
    """The variance over samples of the gradient, element by element, as ``torch.var`` gives it.

    Args:
        correction: the sum of squares is divided by B - correction; NaN where that is not positive.
    """

    passes = 2

    def __init__(self, correction: int = 1) -> None:
        self.correction = correction

    def start(self, call: Call) -> None:
        self._call = call
        self._found: dict[str, Tensor] = {}
        self._divisor = max(call.batch - self.correction, 0)

    def add(self, name: str, factor: Factor) -> None:
        call = self._call
        mean = factor.weighted_sum(torch.full((call.batch,), 1 / call.batch, device=factor.device), call.space)
        self._found[name] = factor.sum_squares(mean, call.space) / self._divisor

    def result(self) -> Any:
        return _pack(self._call, self._found, self._divisor)


def _pack(call: Call, found: dict[str, Tensor], divisor: int) -> Any:
    """Real numbers like each parameter, float32 or wider; where the losses do not reach, the moment of zeros."""
    return call.pack(
        {
            name: found[name].to(wide(p.dtype).to_real())
            if name in found
            else torch.zeros(p.shape, dtype=wide(p.dtype).to_real(), device=p.device) / divisor
            for name, p in call.params.items()
        }
    )
