"""Mean gradients of a validation batch, and the inner products of other gradients with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from .._errors import InteractionError, PerformanceWarning, UnsupportedError
from ..factors import Factor
from ..reductions import Call, Reduction
from ..verbs import reduce

Gradient = Tensor | tuple[Tensor, Tensor]  # of a parameter: itself, or left (r, n) and right (r, m) for leftᵀ · right


class ValuesAndMean(Reduction):
    """The inner product of every gradient with a direction, and the mean gradient of the parameters reached."""

    def __init__(self, direction: Mapping[str, Gradient] | None, *, with_mean: bool = True) -> None:
        self.direction, self.with_mean = direction, with_mean

    def start(self, call: Call) -> None:
        self._call, self._sums = call, dict[str, Tensor]()
        self._values = call.zeros(call.batch)
        self._weights = torch.full_like(self._values, 1 / call.batch)

    def add(self, name: str, factor: Factor) -> None:
        space = self._call.space
        if self.direction is not None:
            direction = self.direction[name]
            if isinstance(direction, Tensor):
                products = factor.dot(direction.to(factor.device).unsqueeze(0), space).squeeze(1)
            else:
                left, right = (side.to(factor.device) for side in direction)
                products = factor.dot_product(left, right, space)
            self._values += products.to(self._values)
        if self.with_mean:
            self._sums[name] = factor.weighted_sum(self._weights, space)

    def result(self) -> tuple[Tensor, dict[str, Tensor]]:
        return self._values, self._sums


class _Mean(Reduction):
    """The mean gradient of the parameters reached, as two matrices where these are small."""

    def start(self, call: Call) -> None:
        self._call, self._found = call, dict[str, Gradient]()
        self._weights = torch.full_like(call.zeros(call.batch), 1 / call.batch)

    def add(self, name: str, factor: Factor) -> None:
        if (sides := factor.sides_of_sum(self._weights)) is None:
            self._found[name] = factor.weighted_sum(self._weights, self._call.space)
        else:
            left, right = (side.clone() for side in sides)  # they may be the batch itself, which may change
            self._found[name] = left, right

    def result(self) -> dict[str, Gradient]:
        return self._found


def as_sides(losses: Tensor, params: Mapping[str, Tensor]) -> dict[str, Gradient] | None:
    """The gradient of the mean of losses by `_Mean`; None where single gradients are slow or cannot be had."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        try:
            found: dict[str, Gradient] = reduce(losses, params, _Mean(), retain_graph=True, independent=True)[0]
        except (InteractionError, UnsupportedError, PerformanceWarning):
            return None
    return found


def by_autograd(losses: Tensor, params: Mapping[str, Tensor]) -> dict[str, Gradient]:
    """The same, where samples may interact."""
    grads = torch.autograd.grad(losses.mean(), list(params.values()), allow_unused=True)
    return {name: g.to_dense() for name, g in zip(params, grads, strict=True) if g is not None}


def written(gradient: Gradient, p: Tensor) -> Tensor:
    """A gradient with the shape of its parameter."""
    return gradient if isinstance(gradient, Tensor) else (gradient[0].t() @ gradient[1]).view(p.shape)


def times(gradient: Gradient, number: float) -> Gradient:
    """A gradient that many times as large."""
    return gradient * number if isinstance(gradient, Tensor) else (gradient[0] * number, gradient[1])
