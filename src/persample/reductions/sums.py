"""The gradients themselves, and their weighted sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..factors import Factor
from ..kernels.pages import fresh
from .base import Call, Reduction


class Stack(Reduction):
    """Every gradient, as ``ps.grad`` gives them: (B, *shape) per parameter."""

    def start(self, call: Call) -> None:
        self._call = call
        self._stacks: dict[str, Tensor] = {}

    def add(self, name: str, factor: Factor) -> None:
        p = self._call.params[name]
        self._stacks[name] = factor.stack(fresh((self._call.batch, *p.shape), p.dtype, p.device))

    def result(self) -> Any:
        batch = self._call.batch
        return self._call.pack(
            {
                name: self._stacks[name]
                if name in self._stacks
                else torch.zeros((batch, *p.shape), dtype=p.dtype, device=p.device)
                for name, p in self._call.params.items()
            }
        )


class WeightedSum(Reduction):
    """Σ_i weights[i] · gradient i, for every parameter: what a backward from ``(weights * losses).sum()`` gives."""

    over_ranks = True

    def __init__(self, weights: Tensor) -> None:
        if not isinstance(weights, Tensor):
            raise TypeError(f"weights must be a tensor of shape (B,), not {type(weights).__name__}")
        self.weights = weights

    def start(self, call: Call) -> None:
        if tuple(self.weights.shape) != (call.batch,):
            raise ValueError(f"weights must have shape ({call.batch},), one per loss, not {tuple(self.weights.shape)}")
        self._call = call
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, factor: Factor) -> None:
        weights = self.weights.detach().to(factor.device)
        self.sums[name] = factor.weighted_sum(weights, self._call.space).to(factor.dtype)

    def result(self) -> Any:
        return self._call.pack_sums(self._call.over_ranks(self.sums))
