"""Clipped sums of the parts of one batch: whole numbers, so that nothing is rounded on the way to the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..factors.limits import Unit
from ..kernels.library import end_to_end
from ..kernels.pages import recycled
from ..reductions import Clipping
from .errors import PrivacyError
from .noise import Sum


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

    def flat(self, grid: float | None) -> Sum:
        """The same in one dim, what is in float64 as it is."""
        if self.numbers.dtype == torch.float64:
            return Sum(self.numbers.view(-1), self.unit.size)
        return Sum(self.on_grid(grid).view(-1))


class Line:
    """Sums in float64, put end to end in tensors of one dim, as few as there are.

    Noise, if there is some to come, is added when they are asked for, so that large sums are gone through once.
    """

    def __init__(self, sums: Sequence[Sum], add_noise: Callable[[Sequence[Sum]], None] | None = None) -> None:
        self._sums, self._add_noise = sums, add_noise

    @classmethod
    def of(
        cls, sums: Sequence[Whole], grid: float | None, add_noise: Callable[[Sequence[Sum]], None] | None = None
    ) -> Line:
        """`Whole.on_grid` of all: neighbours in float64 in one tensor, but large ones on the CPU stay where they are.

        May overwrite the numbers.
        """
        found: list[Sum] = []
        for (is_joined, _), neighbours in groupby(sums, lambda whole: (_is_joined(whole), whole.numbers.device)):
            some = list(neighbours)
            found += [_joined(some)] if is_joined else [whole.flat(grid) for whole in some]
        return cls(found, add_noise)

    @property
    def tensors(self) -> list[Tensor]:
        """The sums."""
        if self._add_noise is None:
            self._sums = [Sum(each.numbers if each.unit == 1 else each.numbers.mul_(each.unit)) for each in self._sums]
        else:
            sums = self._sums
            self._with_noise(sums)
            self._sums = [Sum(each.numbers) for each in sums]
        return [each.numbers for each in self._sums]

    def divided(self, divisor: float, shapes: Iterable[Shape], dtype: torch.dtype) -> list[Tensor]:
        """The first sums over a number, of these shapes and that dtype. The sums may be overwritten."""
        found, waiting = [], iter(self._over(divisor, dtype))
        mean = next(waiting)
        start, end = _place(mean)
        for shape in shapes:
            while shape.size and start == end:
                mean = next(waiting)
                start, end = _place(mean)
            found.append(mean.as_strided(shape.dims, shape.strides, start))
            start += shape.size
        return found

    def _over(self, divisor: float, dtype: torch.dtype) -> list[Tensor]:
        """All sums over a number."""
        if self._add_noise is None:
            return [_divided(t, divisor, dtype) for t in self.tensors]
        goals = [each._replace(into=_room_for(each.numbers, dtype), divisor=divisor) for each in self._sums]
        self._with_noise(goals)
        return [each.goal for each in goals]

    def _with_noise(self, sums: Sequence[Sum]) -> None:
        """Add the noise, which is drawn once: what it is added to is kept no longer, whether that succeeds or not."""
        add_noise, self._add_noise, self._sums = self._add_noise, None, []
        assert add_noise is not None
        add_noise(sums)


_LARGE = 2**16  # numbers, which take longer to copy than to be worked on by themselves


def _is_joined(whole: Whole) -> bool:
    numbers = whole.numbers
    return numbers.dtype == torch.float64 and (numbers.device.type != "cpu" or numbers.numel() < _LARGE)


def _joined(sums: Sequence[Whole]) -> Sum:
    """Sums in float64, end to end: in their unit, or as multiples of 1."""
    line = end_to_end([whole.numbers for whole in sums])
    if len({whole.unit.exponent for whole in sums}) == 1:
        return Sum(line, sums[0].unit.size)
    for piece, whole in zip(line.split([whole.numbers.numel() for whole in sums]), sums, strict=True):
        piece.mul_(whole.unit.size)
    return Sum(line)


def _divided(numbers: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """Numbers over a divisor, in this dtype. They may be overwritten."""
    found = _room_for(numbers, dtype)
    if found is numbers:
        return numbers.div_(divisor)
    if numbers.device.type != "cpu":
        return found.copy_(numbers.div_(divisor))
    quotients = numbers.new_empty(min(len(numbers), _LARGE))  # which stay in the cache
    for some, into in zip(numbers.split(_LARGE), found.split(_LARGE), strict=True):
        into.copy_(torch.div(some, divisor, out=quotients[: len(some)]))
    return found


def _room_for(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for as many numbers of a dtype: their own, or some that is used again, as fresh pages cost more."""
    return numbers if numbers.dtype == dtype else recycled(tuple(numbers.shape), dtype, numbers.device)


def _place(t: Tensor) -> tuple[int, int]:
    """Where a tensor without gaps begins and ends in its memory."""
    start = t.storage_offset()
    return int(start), int(start + t.numel())


class Shape(NamedTuple):
    """Of a sum: that of its parameter, where complex numbers are pairs."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, p: Tensor) -> Shape:
        """Of a parameter's sum, without gaps."""
        dims = (*p.shape, 2) if p.is_complex() else tuple(p.shape)
        return cls(dims, torch.empty(dims, device="meta").stride(), math.prod(dims))


class Joined(NamedTuple):
    """The sums of parameters of these names, end to end."""

    names: tuple[str, ...]
    numbers: Tensor


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

    @property
    def line(self) -> Joined | None:
        """All sums, if they come together."""


class Taken(Clipped, Protocol):
    """The same, where sums are taken one by one."""

    def take(self, name: str) -> Tensor | None:
        """A parameter's sum, once; None for zero."""


class Sums:
    """Adds up what the parts of a batch give; holds nothing between batches."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params  # those of this process, of the shapes that sums have
        self.shapes = [Shape.of(p) for p in params.values()]
        single = all(p.dtype in (torch.bfloat16, torch.float32) for p in params.values())
        self.dtype = torch.float32 if single else torch.float64
        self._in_one_place = tuple(params) if len({p.device for p in params.values()}) == 1 else None
        self.clear()

    def clear(self) -> None:
        """Forget the parts so far."""
        self._sums: dict[str, Tensor] = {}
        self._line: Joined | None = None  # or all of them together
        self._count: Tensor | None = None

    def add(self, clipped: Clipped | Taken, count: Tensor | None) -> float:
        """One more part; returns the share of its samples that were weighed down."""
        line = clipped.line
        if line is not None and self.are_empty:
            self._line = line
        elif line is not None and self._line is not None and line.names == self._line.names:
            self._line.numbers.add_(line.numbers)
        else:
            self._part_line()
            parts = clipped.take if line is None else self._parted(line).get  # type: ignore[union-attr]
            for name in self._params:
                if (part := parts(name)) is not None:
                    self._sums[name] = part.contiguous() if name not in self._sums else self._sums[name].add_(part)
        if count is not None:
            self._count = count if self._count is None else self._count + count
        return clipped.weighed_down

    def _part_line(self) -> None:
        """Hold sums by name."""
        if self._line is not None:
            self._sums, self._line = self._parted(self._line), None

    def _parted(self, line: Joined) -> dict[str, Tensor]:
        shapes = dict(zip(self._params, self.shapes, strict=True))
        parts = line.numbers.split([shapes[name].size for name in line.names])
        return {
            name: part.view(shapes[name].dims).to(self._params[name].device)
            for name, part in zip(line.names, parts, strict=True)
        }

    @property
    def are_empty(self) -> bool:
        """Whether no parameter was reached by any part so far."""
        return not self._sums and (self._line is None or not self._line.names)

    def check_reached(self) -> None:
        """Refuse if no parameter was reached by any part so far."""
        if self.are_empty:
            raise PrivacyError(
                "the losses depend on none of the trainable parameters: compute them with the model that dp.Private "
                "was given, not with a copy of it, or the step would be of noise alone"
            )

    def take(self, units: Mapping[str, Unit], counted_in: Unit | None, counts: int = 1) -> list[Whole]:
        """The sums in the parameters' order, and counts if the clip asks for some; zeros where nothing came.

        Sums that have come together, in one unit, stay so.
        """
        wholes = []
        if (
            self._line is not None
            and self._line.names == self._in_one_place
            and len({u.exponent for u in units.values()}) == 1
        ):
            wholes.append(Whole(self._line.numbers, units[self._line.names[0]]))
        else:
            self._part_line()
            wholes += [
                self._whole(name, shape, units[name]) for name, shape in zip(self._params, self.shapes, strict=True)
            ]
        if counted_in is not None:
            device = wholes[0].numbers.device if wholes else None
            count = torch.zeros(counts, dtype=torch.int64, device=device) if self._count is None else self._count
            wholes.append(Whole(count, counted_in))
        self.clear()
        return wholes

    def _whole(self, name: str, shape: Shape, unit: Unit) -> Whole:
        numbers = self._sums.pop(name, None)
        if numbers is None:
            numbers = torch.zeros(shape.dims, dtype=unit.dtype, device=self._params[name].device)
        return Whole(numbers, unit)
