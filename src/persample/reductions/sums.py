"""All gradients, written out (`Stack`), and their weighted sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..factors import Factor
from ..kernels.differentiable import detached_by_default, is_differentiable
from ..kernels.pages import fresh
from ..numberless import storage_of
from .base import Call, Reduction

Buffers = Mapping[str, Tensor] | Sequence[Tensor]


class Stack(Reduction):
    """Every gradient, (B, *shape) per parameter: what ``ps.grad`` returns.

    Args:
        out: one buffer per parameter, by name or in the order of the parameters, to be written instead of allocating
            new ones.
    """

    takes_stacks = False  # but writes them

    def __init__(self, out: Buffers | None = None) -> None:
        self.out = out

    def start(self, call: Call) -> None:
        self._call = call
        if self.out is not None and is_differentiable():
            raise ValueError(
                "out= cannot be written with create_graph=True, as the graph keeps what it holds: drop one"
            )
        self._buffers = {} if self.out is None else _checked_buffers(self.out, call)
        self._stacks: dict[str, Tensor] = {}

    def add(self, name: str, factor: Factor) -> None:
        if is_differentiable():
            stack = factor.stack()
            shared = storage_of(stack) in map(storage_of, factor.tensors)  # with cotangents, and perhaps other results
            self._stacks[name] = stack.clone() if shared else stack
            return
        self._stacks[name] = factor.stack(self._buffers[name] if self._buffers else self._new(name))

    def result(self) -> Any:
        stacks = self._stacks
        return self._call.pack(
            {name: stacks[name] if name in stacks else self._zeros(name) for name in self._call.params}
        )

    def _new(self, name: str) -> Tensor:
        p = self._call.params[name]
        return fresh((self._call.batch, *p.shape), p.dtype, p.device)

    def _zeros(self, name: str) -> Tensor:
        """The gradients of a parameter that no loss reaches."""
        p = self._call.params[name]
        if self._buffers:
            return self._buffers[name].zero_()
        return torch.zeros((self._call.batch, *p.shape), dtype=p.dtype, device=p.device)


def _checked_buffers(out: Buffers, call: Call) -> dict[str, Tensor]:
    """The buffers of ``out`` by parameter name; refused if one is missing, left over, or not as a result would be."""
    given = dict(out) if isinstance(out, Mapping) else {str(i): t for i, t in enumerate(out)}
    if set(given) != set(call.params):
        raise ValueError(f"out must hold one buffer per parameter: expected {list(call.params)}, got {list(given)}")
    for name, p in call.params.items():
        buffer, expected = given[name], (call.batch, *p.shape)
        if not isinstance(buffer, Tensor):
            raise TypeError(f"out[{name!r}] must be a tensor of shape {expected}, not {type(buffer).__name__}")
        if tuple(buffer.shape) != expected or buffer.dtype != p.dtype or buffer.device != p.device:
            raise ValueError(
                f"out[{name!r}] must be {expected} {p.dtype} on {p.device}, "
                f"but is {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}"
            )
    return given


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
        weights = detached_by_default(self.weights).to(factor.device)
        self.sums[name] = factor.weighted_sum(weights, self._call.space).to(factor.dtype)

    def result(self) -> Any:
        return self._call.pack_sums(self._call.over_ranks(self.sums))
