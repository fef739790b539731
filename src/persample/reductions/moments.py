"""Moments of gradients over the samples, element by element: the second moment and the variance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..factors import Factor
from ..kernels.norms import wide
from .base import Call, Reduction
from .sums import added


class SecondMoment(Reduction):
    """The mean over samples of the squared gradient, element by element; NaN for no samples."""

    over_ranks = True
    in_portions = True

    def start(self, call: Call) -> None:
        self._call = call
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, factor: Factor) -> None:
        self._sums[name] = factor.sum_squares(None, self._call.space)

    def result(self) -> Any:
        return self.join([self._sums], self._call)

    def portion(self) -> dict[str, Tensor]:
        return self._sums

    def condense(self, portions: list[Any]) -> list[Any]:
        return [added(portions)]

    def join(self, portions: Sequence[Any], call: Call) -> Any:
        return _pack(call, call.over_ranks(added(portions), real=True), call.samples)


class Variance(Reduction):
    """The variance over samples of the gradient, element by element, as ``torch.var`` gives it.

    Args:
        correction: the sum of squares is divided by B - correction; NaN where that is not positive.
    """

    passes = 2
    over_ranks = True
    in_portions = True

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
        if call.ranks is not None or call.positions is not None:
            self._means[name] = mean

    def result(self) -> Any:
        return self.join([self.portion()], self._call)

    def portion(self) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
        """How many samples, their means, and the sums of squared distances from these."""
        return self._call.batch, self._means, self._squares

    def condense(self, portions: list[Any]) -> list[Any]:
        count, sums = sum(count for count, _, _ in portions), added([_times(means, n) for n, means, _ in portions])
        means = {name: total / max(count, 1) for name, total in sums.items()}
        return [(count, means, _squares_about(means, portions))]

    def join(self, portions: Sequence[Any], call: Call) -> Any:
        ((count, means, squares),) = self.condense(list(portions)) if len(portions) > 1 else portions
        if call.ranks is not None:
            totals = call.over_ranks(_times(means, count))
            of_all = {name: total / max(call.samples, 1) for name, total in totals.items()}
            squares = _squares_about(of_all, [(count, means, squares)])
        return _pack(call, call.over_ranks(squares, real=True), max(call.samples - self.correction, 0))


def _times(means: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    return {name: mean * count for name, mean in means.items()}


def _squares_about(centers: Mapping[str, Tensor], portions: Sequence[Any]) -> dict[str, Tensor]:
    """Sums of squared distances from these means, of portions that know those from their own."""
    squares: dict[str, Tensor] = {}
    for name, center in centers.items():
        for count, means, around in portions:
            shift = (means.get(name, torch.zeros_like(center)) - center).abs().square()
            more = count * shift + around.get(name, torch.zeros_like(shift))
            squares[name] = squares[name] + more if name in squares else more
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
