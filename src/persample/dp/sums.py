"""Clipped sums of the parts of one batch: whole numbers, so that nothing is rounded on the way to the noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..factors.limits import Unit
from ..graph.read.saved import viewed
from ..kernels.library import end_to_end
from ..reductions import Clipping


@dataclass(frozen=True)
class Whole:
    """Whole ``numbers`` of a unit, of its dtype. Complex numbers are pairs."""

    numbers: Tensor
    unit: Unit

    def on_grid(self, grid: float | None) -> Tensor:
        """In float64, what is in int64 rounded to multiples of a power of two, if one is given.

        In float64 it would be rounded twice, as it may have more than 53 bits. May overwrite the numbers.
        """
        shift = 0 if grid is None else math.frexp(grid)[1] - 1 - self.unit.exponent
        if grid is None or shift <= 0 or self.numbers.dtype == torch.float64:
            return self.numbers.double().mul_(self.unit.size)
        return ((self.numbers + (1 << (shift - 1))) >> shift).double().mul_(grid)


@dataclass(frozen=True)
class Line:
    """Sums in float64, of one dim each, put end to end: those that were in float64 before are parts of one tensor."""

    tensors: Sequence[Tensor]  # as few as there are
    parts: list[Tensor]  # one for each sum

    @classmethod
    def of(cls, sums: Sequence[Whole], grid: float | None) -> Line:
        """`Whole.on_grid` of all; may overwrite the numbers."""
        ready = [whole for whole in sums if whole.numbers.dtype == torch.float64]
        others = [whole.on_grid(grid).view(-1) for whole in sums if whole.numbers.dtype != torch.float64]
        if not ready or len({whole.numbers.device for whole in ready}) > 1 or ready[-1] is not sums[len(ready) - 1]:
            parts = [whole.on_grid(grid).view(-1) for whole in sums]
            return cls(parts, parts)
        joined = end_to_end([whole.numbers for whole in ready])
        pieces = joined.split([whole.numbers.numel() for whole in ready])
        if len({whole.unit.exponent for whole in ready}) == 1:
            joined.mul_(ready[0].unit.size)
        else:
            for piece, whole in zip(pieces, ready, strict=True):
                piece.mul_(whole.unit.size)
        return cls([joined, *others], [*pieces, *others])


def divided(sums: Sequence[Tensor], divisor: float, params: Sequence[Tensor]) -> list[Tensor]:
    """Sums in float64 over a number, like the parameters in shape, and in dtype if that is float32 for all.

    Complex numbers are pairs. The sums may be overwritten.
    """
    whole = viewed(sums[0])
    if whole is None or whole.numel() != sum([t.numel() for t in sums]) or any(viewed(t) is not whole for t in sums):
        return [t.div_(divisor).view(*p.shape, *[2] * p.is_complex()) for t, p in zip(sums, params, strict=True)]
    whole.div_(divisor)
    if all(p.dtype == torch.float32 for p in params):
        sums = whole.view(-1).to(torch.float32).split([t.numel() for t in sums])
        return [t.view(p.shape) for t, p in zip(sums, params, strict=True)]
    return [t.view(*p.shape, *[2] * p.is_complex()) for t, p in zip(sums, params, strict=True)]


class Clipped(Protocol):
    """The clipped sums of a part of a batch."""

    @property
    def clipping(self) -> Clipping:
        """What became of its samples."""

    @property
    def asked(self) -> Clipping:
        """What became of its samples by the weights that were asked for, before they were rounded."""

    @property
    def weighed_down(self) -> float:
        """The share of its samples that have a weight below one."""

    def take(self, name: str) -> Tensor | None:
        """A parameter's sum, once; None for zero."""


class Sums:
    """Adds up what the parts of a batch give; holds nothing between batches."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params  # those of this process, of the shapes that sums have
        self.shaped_like = list(params.values())
        self.clear()

    def clear(self) -> None:
        """Forget the parts so far."""
        self._sums: dict[str, Tensor] = {}
        self._count: Tensor | None = None

    def add(self, clipped: Clipped, count: Tensor | None) -> float:
        """One more part; returns the share of its samples that were weighed down."""
        for name in self._params:
            part = clipped.take(name)
            if part is not None:
                self._sums[name] = part.contiguous() if name not in self._sums else self._sums[name].add_(part)
        if count is not None:
            self._count = count if self._count is None else self._count + count
        return clipped.weighed_down

    @property
    def are_empty(self) -> bool:
        """Whether no parameter was reached by any part so far."""
        return not self._sums

    def take(self, units: Mapping[str, Unit], counted_in: Unit | None) -> list[Whole]:
        """The sums in the parameters' order, and the count if the clip asks for one; zeros where nothing came."""
        wholes = []
        for name, p in self._params.items():
            numbers = self._sums.pop(name, None)
            if numbers is None:
                shape = (*p.shape, 2) if p.is_complex() else p.shape
                numbers = torch.zeros(shape, dtype=units[name].dtype, device=p.device)
            wholes.append(Whole(numbers, units[name]))
        if counted_in is not None:
            device = wholes[0].numbers.device if wholes else None
            count = torch.zeros(1, dtype=torch.int64, device=device) if self._count is None else self._count
            wholes.append(Whole(count, counted_in))
        self.clear()
        return wholes
