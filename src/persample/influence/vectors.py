"""Vectors of all parameters, several as the rows of one matrix (Q, P), and passes over data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..factors import Factor
from ..factors.stacks import real_rows
from ..reductions import Reduction
from ..reductions.base import Call
from .curvature.base import Curvature, Fitted
from .loaders import check_order


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require gradients, by name."""
    params: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise ValueError("the model has no parameter that requires gradients")
    wrong = [name for name, p in params.items() if p.is_complex()]
    if wrong:
        raise TypeError(f"complex parameters have no curvature here: freeze {wrong}, or view them as real ones")
    return params


def matrix_of(params: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """The rows and columns as which gradients are seen."""
    return {n: (p.shape[0], prod(p.shape[1:])) if p.ndim else (1, 1) for n, p in params.items()}


def joined(vectors: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Tensor:
    """(Q, P) from (Q, ...) for every parameter."""
    return torch.cat([vectors[name].flatten(1) for name in params], 1)


def parted(vectors: Tensor, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(Q, *shape) for every parameter from (Q, P), in the parameters' dtypes."""
    parts = vectors.split([p.numel() for p in params.values()], 1)
    return {n: v.reshape(-1, *p.shape).to(p.dtype) for (n, p), v in zip(params.items(), parts, strict=True)}


def applied(fitted: Fitted, vectors: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """(Q, P): a fitted curvature's inverse times every vector, in the vectors' dtype."""
    shapes = matrix_of(params)
    parts = {n: v * fitted.scales.get(n, 1) for n, v in parted(vectors, params).items()}
    blocks = {n: v.reshape(-1, *shapes[n]).to(vectors.dtype) for n, v in parts.items()}
    return joined(fitted.apply(blocks), params)


def batches(loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """The batches of one pass, with their numbers."""
    if iter(loader) is loader:
        raise TypeError("the loader can be gone through only once: pass a DataLoader or a list of batches instead")
    if isinstance(loader, Sized) and not len(loader):
        raise ValueError("no samples: the loader is empty")
    check_order(loader)
    return enumerate(loader)


class WeightedSums(Reduction):
    """(Q, *shape) per parameter: Σ_b weights[b, q] · gradient[b]."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def start(self, call: Call) -> None:
        self._call, self._found = call, dict[str, Tensor]()

    def add(self, name: str, factor: Factor) -> None:
        count = self.weights.shape[1]
        if count == 1:
            self._found[name] = factor.weighted_sum(self.weights[:, 0], self._call.space).unsqueeze(0)
            return
        total: Tensor | None = None
        for some, stack in factor.stacks(self._call.space):
            rows = real_rows(stack)
            part = self.weights[some].t().to(rows.dtype) @ rows
            total = part if total is None else total.add_(part)
        if total is not None:
            self._found[name] = total.view(count, *factor.shape)

    def result(self) -> dict[str, Tensor]:
        count = self.weights.shape[1]
        return {n: self._found.get(n, p.new_zeros(count, *p.shape).detach()) for n, p in self._call.params.items()}


class Fit(Reduction):
    """Gives the factors of a batch to a curvature, none of them written out unless it has to be."""

    def __init__(self, curvature: Curvature) -> None:
        self.curvature = curvature

    def start(self, call: Call) -> None:
        self._call = call

    def add(self, name: str, factor: Factor) -> None:
        self.curvature.take(name, factor, self._call.space)

    def result(self) -> None:
        self.curvature.count(self._call.batch)
