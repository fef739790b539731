"""Mean gradients of a validation batch, and the inner products of other gradients with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .._errors import InteractionError, PerformanceWarning, UnsupportedError
from ..factors import Factor, Workspace
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
        space, weights = self._call.space, self._weights
        if self.direction is None:
            self._sums[name] = factor.weighted_sum(weights, space)
            return
        direction = _on(factor.device, self.direction[name])
        if self.with_mean and (isinstance(direction, Tensor) or factor.prefers_stack(reused=True)):
            direction = written(direction, factor.shape)
            products, self._sums[name] = factor.dot_and_sum(direction, weights, space)
        else:
            products = _products(factor, direction, space)
            if self.with_mean:
                self._sums[name] = factor.weighted_sum(weights, space)
        self._values += products.to(self._values)

    def result(self) -> tuple[Tensor, dict[str, Tensor]]:
        return self._values, self._sums


def _on(device: torch.device, gradient: Gradient) -> Gradient:
    return gradient.to(device) if isinstance(gradient, Tensor) else (gradient[0].to(device), gradient[1].to(device))


def _products(factor: Factor, direction: Gradient, space: Workspace) -> Tensor:
    """(B,): the inner product of every gradient with a direction."""
    if isinstance(direction, Tensor):
        return factor.dot(direction.unsqueeze(0), space).squeeze(1)
    return factor.dot_product(*direction, space)


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


def are_mostly_sides(gradients: Mapping[str, Gradient]) -> bool:
    """Are at least half of all elements not written out? Otherwise autograd costs less."""
    kept = sum(g[0].shape[1] * g[1].shape[1] for g in gradients.values() if not isinstance(g, Tensor))
    return kept >= sum(g.numel() for g in gradients.values() if isinstance(g, Tensor))


def written(gradient: Gradient, shape: Sequence[int]) -> Tensor:
    """A gradient with the shape of its parameter."""
    return gradient if isinstance(gradient, Tensor) else (gradient[0].t() @ gradient[1]).view(shape)


def times(gradient: Gradient, number: float) -> Gradient:
    """A gradient that many times as large."""
    return gradient * number if isinstance(gradient, Tensor) else (gradient[0] * number, gradient[1])
