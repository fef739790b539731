"""All gradients, written out (`Stack`), and their weighted sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from math import prod
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
    in_portions = True

    def __init__(self, out: Buffers | None = None) -> None:
        self.out = out
        self._whole: dict[str, Tensor] | None = None  # with several losses per sample, (B, K, *shape) each

    def start(self, call: Call) -> None:
        self._call = call
        if self.out is not None and is_differentiable():
            raise ValueError(
                "out= cannot be written with create_graph=True, as the graph keeps what it holds: drop one"
            )
        self._buffers = {} if self.out is None or self._whole is not None else _checked_buffers(self.out, call)
        self._stacks: dict[str, Tensor] = {}

    def for_all(self, call: Call) -> Reduction:
        """Portions write to their places in one result."""
        buffers = {} if self.out is None else _checked_buffers(self.out, call)
        samples, count = call.shape[0], prod(call.shape[1:])
        every = copy(self)
        every._whole = {
            name: _with_positions(buffers[name], name, samples, count, p)
            if buffers
            else fresh((samples, count, *p.shape), p.dtype, p.device)
            for name, p in call.params.items()
        }
        return every

    def portion(self) -> dict[str, Tensor]:
        """All of the result, in which this portion is now written."""
        assert self._whole is not None
        for name in self._whole:
            if name not in self._stacks:
                self._rows(self._whole[name]).zero_()
        return self._whole

    def condense(self, portions: list[Any]) -> list[Any]:
        return portions[-1:]

    def join(self, portions: Sequence[Any], call: Call) -> Any:
        given = {} if self.out is None else _checked_buffers(self.out, call)
        return call.pack(
            {
                name: given[name] if given else portions[-1][name].view(*call.shape, *p.shape)
                for name, p in call.params.items()
            }
        )

    def _rows(self, whole: Tensor) -> Tensor:
        """(B, k, *shape): the place of this portion."""
        positions = self._call.positions
        return whole if positions is None else whole[:, positions.start : positions.stop]

    def _write(self, rows: Tensor, factor: Factor) -> None:
        if rows.is_contiguous():
            factor.stack(rows.flatten(0, 1))
            return
        for some, stack in factor.stacks(self._call.space):
            which = torch.arange(some.start, some.stop, device=rows.device)
            rows[which // rows.shape[1], which % rows.shape[1]] = stack.to(rows.dtype)

    def add(self, name: str, factor: Factor) -> None:
        if self._whole is not None:
            self._stacks[name] = self._rows(self._whole[name])
            self._write(self._stacks[name], factor)
            return
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
        buffer, expected = given[name], (*call.shape, *p.shape)
        if not isinstance(buffer, Tensor):
            raise TypeError(f"out[{name!r}] must be a tensor of shape {expected}, not {type(buffer).__name__}")
        if tuple(buffer.shape) != expected or buffer.dtype != p.dtype or buffer.device != p.device:
            raise ValueError(
                f"out[{name!r}] must be {expected} {p.dtype} on {p.device}, "
                f"but is {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}"
            )
    return given


def _with_positions(buffer: Tensor, name: str, samples: int, count: int, p: Tensor) -> Tensor:
    """(B, K, *shape): the same memory, with all positions in one dim."""
    try:
        return buffer.view(samples, count, *p.shape)
    except RuntimeError:
        raise ValueError(
            f"out[{name!r}] of shape {tuple(buffer.shape)} must have the positions of a sample one after another in "
            f"memory: pass a contiguous buffer"
        ) from None


class WeightedSum(Reduction):
    """Σ_i weights[i] · gradient i, for every parameter: what a backward from ``(weights * losses).sum()`` gives."""

    over_ranks = True
    in_portions = True

    def __init__(self, weights: Tensor) -> None:
        if not isinstance(weights, Tensor):
            raise TypeError(f"weights must be a tensor of shape (B,), not {type(weights).__name__}")
        self.weights = weights

    def start(self, call: Call) -> None:
        if tuple(self.weights.shape) != call.shape:
            raise ValueError(f"weights must have shape {call.shape}, one per loss, not {tuple(self.weights.shape)}")
        self._call, self._own = call, call.own(detached_by_default(self.weights))
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, factor: Factor) -> None:
        sums = factor.weighted_sum(self._own.to(factor.device), self._call.space)
        self.sums[name] = sums if self._call.positions is not None else sums.to(factor.dtype)

    def result(self) -> Any:
        return self.join([self.sums], self._call)

    def portion(self) -> dict[str, Tensor]:
        return self.sums

    def condense(self, portions: list[Any]) -> list[Any]:
        return [added(portions)]

    def join(self, portions: Sequence[Any], call: Call) -> Any:
        return call.pack_sums(call.over_ranks(added(portions)))


def added(portions: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sums over all portions, for the parameters that any of them has."""
    total: dict[str, Tensor] = {}
    for portion in portions:
        for name, part in portion.items():
            total[name] = total[name] + part if name in total else part
    return total
