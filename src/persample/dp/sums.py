"""Clipped sums of the parts of one batch: whole numbers, so that nothing is rounded on the way to the noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..factors.limits import Unit
from ..kernels.library import end_to_end
from ..reductions import Clipping


class Whole(NamedTuple):
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
    """Sums in float64, put end to end in tensors of one dim, as few as there are."""

    tensors: list[Tensor]
    sizes: Sequence[Sequence[int]]  # of the sums in each tensor

    @classmethod
    def of(cls, sums: Sequence[Whole], grid: float | None) -> Line:
        """`Whole.on_grid` of all: those that are in float64 already in one tensor. May overwrite the numbers."""
        ready = list(takewhile(lambda whole: whole.numbers.dtype == torch.float64, sums))
        if len({whole.numbers.device for whole in ready}) != 1:
            ready = []
        others = [whole.on_grid(grid).view(-1) for whole in sums[len(ready) :]]
        alone = [[len(numbers)] for numbers in others]
        if not ready:
            return cls(others, alone)
        sizes = [whole.numbers.numel() for whole in ready]
        joined = end_to_end([whole.numbers for whole in ready])
        if len({whole.unit.exponent for whole in ready}) == 1:
            joined.mul_(ready[0].unit.size)
        else:
            for piece, whole in zip(joined.split(sizes), ready, strict=True):
                piece.mul_(whole.unit.size)
        return cls([joined, *others], [sizes, *alone])

    @property
    def parts(self) -> list[Tensor]:
        """One tensor of one dim for each sum, which share memory with this."""
        return [part for t, sizes in zip(self.tensors, self.sizes, strict=True) for part in t.split(list(sizes))]

    def divided(self, divisor: float, shapes: Iterable[Shape], dtype: torch.dtype) -> list[Tensor]:
        """Sums over a number, of these shapes and that dtype; those of further shapes are left out.

        The sums may be overwritten.
        """
        found, left = [], iter(shapes)
        for t, sizes in zip(self.tensors, self.sizes, strict=True):
            mean = t.div_(divisor).to(dtype)
            start = mean.storage_offset()
            for size, shape in zip(sizes, left, strict=False):
                found.append(mean.as_strided(shape.dims, shape.strides, start))
                start += size
        return found


class Shape(NamedTuple):
    """Of a sum: that of its parameter, where complex numbers are pairs."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, p: Tensor) -> Shape:
        """Of a parameter's sum, without gaps."""
        dims = (*p.shape, 2) if p.is_complex() else tuple(p.shape)
        return cls(dims, torch.empty(dims, device="meta").stride())


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
        self.shapes = [Shape.of(p) for p in params.values()]
        self.dtype = torch.float32 if all(p.dtype == torch.float32 for p in params.values()) else torch.float64
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
        for (name, p), shape in zip(self._params.items(), self.shapes, strict=True):
            numbers = self._sums.pop(name, None)
            if numbers is None:
                numbers = torch.zeros(shape.dims, dtype=units[name].dtype, device=p.device)
            wholes.append(Whole(numbers, units[name]))
        if counted_in is not None:
            device = wholes[0].numbers.device if wholes else None
            count = torch.zeros(1, dtype=torch.int64, device=device) if self._count is None else self._count
            wholes.append(Whole(count, counted_in))
        self.clear()
        return wholes
