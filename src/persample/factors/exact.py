"""Sums over samples that are exact, of shares that are bounded: what one sample can move is a theorem.

A sum in floating point rounds at every addition, and how it rounds depends on all samples. Two sums that differ in one
sample may so differ by more than that sample: by any amount, where somebody chooses the data and their order. Here
every sample's share is rounded on its own, to whole numbers of one `Unit`, and whole numbers are added up without
rounding, in any order, over parts of a batch and over processes.

What a sample adds with weight w is at most ``w · bound + √w · root + rest`` (`Limits`), by bounds of rounding errors
that hold for all data (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3), not by what is usual.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.norms import row_norms, wide, widest
from .workspace import Workspace

if TYPE_CHECKING:
    from .base import Factor

_BITS = 42  # the unit is smaller than the bound by so many powers of two, at most
_LONG = 61  # bits of a sum in int64, with room to spare
_WHOLE = 2.0**53  # whole numbers below are exact in float64
_RATIO = 2.0**9  # how much larger than a bound the terms of one sample's share may be
_NORM = 2.0**-15  # the relative error of a norm: runs of 512 squares in float32
_WIDE_NORM = 2.0**-22  # the same in float64, of up to 2**30 squares
_PASSES = 2.0**-21  # the relative error of what is scaled: by a weight that is rounded, and the product, in float32
_IN_RANGE = 1e30  # scales beyond are not for float32
_CACHE = 2**20  # bytes of gradients that are rounded at a time


@dataclass(frozen=True)
class Unit:
    """A power of two, 2**exponent, of which all shares are whole numbers: far below a public bound."""

    exponent: int

    @classmethod
    def below(cls, bound: float, samples: int) -> Unit:
        """For the sum of so many samples of at most the bound each: as small as 64 bits allow, but no smaller than
        products in float64 do."""
        return cls(math.frexp(bound)[1] - min(_BITS, _LONG - samples.bit_length()))

    @property
    def size(self) -> float:
        """The unit itself."""
        return math.ldexp(1.0, self.exponent)


@dataclass(frozen=True)
class Limits:
    """What samples can add: with weight w at most ``w · bound + √w · root + rest``, of terms of ``w · size``."""

    bound: Tensor  # (B,)
    root: Tensor  # (B,)
    rest: float
    size: Tensor  # (B,)

    @classmethod
    def together(cls, every: Sequence[Limits]) -> Limits:
        """Of several parameters as one vector."""
        bound, root = (row_norms(torch.stack(t, 1)) for t in zip(*[(x.bound, x.root) for x in every], strict=True))
        size = torch.stack([x.size for x in every]).amax(0)
        return cls(bound, root, math.hypot(*[x.rest for x in every]), size)

    @classmethod
    def added(cls, every: Sequence[Limits]) -> Limits:
        """Of several terms of one gradient."""
        bound, root, size = (
            torch.stack(t).sum(0) for t in zip(*[(x.bound, x.root, x.size) for x in every], strict=True)
        )
        return cls(bound, root, math.fsum(x.rest for x in every), size)

    def weights(self, most: float) -> Tensor:
        """(B,): the largest weights with which no sample adds more than ``most``."""
        room = max(most * (1 - 2.0**-40) - self.rest, 0.0)
        root = 2 * room / (self.root + (self.root.square() + 4 * room * self.bound).sqrt())
        return torch.minimum(root.square(), _RATIO * most / self.size).nan_to_num(nan=0.0, posinf=math.inf)


def roundoff(dtype: torch.dtype, terms: int = 1) -> float:
    """The relative error of so many additions of products, in whatever order, in float32 or wider."""
    each = torch.finfo(wide(dtype).to_real()).eps / 2
    return (terms + 4) * each / (1 - (terms + 4) * each)


def norm_error(dtype: torch.dtype) -> float:
    """What a norm of gradients of that dtype has to be multiplied with to be at least as large as without rounding."""
    half = torch.finfo(dtype).eps if wide(dtype) != dtype else 0.0
    return 1 + 2 * (_WIDE_NORM if wide(dtype).to_real() == torch.float64 else _NORM) + 2 * half


def gram_bounds(norms: Tensor, sizes: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """(B,): at least the norms that were found from Gram matrices, whose elements are sums of ``terms`` products."""
    return (norms.square() + 2 * roundoff(dtype, terms) * sizes.square()).sqrt() * norm_error(dtype)


class Exact(ABC):
    """Gradients of some samples, to be summed as whole numbers of a unit."""

    limits: Limits

    @abstractmethod
    def total(self, weights: Tensor) -> Tensor:
        """(*shape) in int64: Σ_b of weights[b] · gradient[b], each rounded; complex numbers are pairs of a last dim."""


class Written(Exact):
    """Any gradients: written out a few at a time, and rounded."""

    def __init__(self, factor: Factor, unit: Unit, space: Workspace) -> None:
        self._factor, self._unit, self._space = factor, unit, space
        reals = factor.numel * (2 if factor.dtype.is_complex else 1)
        bound = factor.norm_bounds(space) * (1 + _PASSES)
        self.limits = Limits(bound, torch.zeros_like(bound), math.sqrt(reals) / 2 * unit.size, bound)

    def total(self, weights: Tensor) -> Tensor:
        factor, scales = self._factor, weights / self._unit.size
        shape = (*factor.shape, 2) if factor.dtype.is_complex else factor.shape
        found = torch.zeros(math.prod(shape), dtype=torch.int64, device=factor.device)
        if not found.numel():
            return found.view(shape)
        for some, part in factor.stacks(self._space):
            rows, scale = _real(part), scales[some].to(part.device)
            step = max(1, min(_CACHE // (rows.shape[1] * rows.element_size()), int(_RATIO)))
            for start in range(0, len(rows), step):
                whole = rounded(rows[start : start + step], scale[start : start + step])
                found += whole.sum(0, dtype=torch.float64).to(torch.int64)
        return found.view(shape)


class Listed(Exact):
    """Rows of a table: each is rounded, and added where it belongs."""

    def __init__(self, ids: Tensor, rows: Tensor, table: int, bounds: Tensor, sizes: Tensor, unit: Unit) -> None:
        self._ids, self._rows, self._table, self._unit = ids, rows, table, unit  # (B, T) and (B, T, *row)
        reals = math.prod(rows.shape[1:]) * (2 if rows.is_complex() else 1)
        zero = torch.zeros_like(bounds)
        self.limits = Limits(bounds + _PASSES * sizes, zero, math.sqrt(reals) / 2 * unit.size, sizes)

    def total(self, weights: Tensor) -> Tensor:
        rows = torch.view_as_real(self._rows.resolve_conj()) if self._rows.is_complex() else self._rows
        shape = (self._table, *rows.shape[2:])
        found = torch.zeros(self._table, math.prod(shape[1:]), dtype=torch.int64, device=rows.device)
        if not found.numel() or not rows.numel():
            return found.view(shape)
        whole = rounded(rows.reshape(len(rows), -1), weights / self._unit.size)
        live, ids = self._ids.reshape(-1) >= 0, self._ids.reshape(-1)
        values = whole.view(len(ids), -1).to(torch.int64)
        return found.index_add_(0, ids[live], values[live]).view(shape)


class Product(Exact):
    """Sums of products of two sides, both rounded: the products are whole numbers, and so is every sum of them.

    Both sides of a sample are scaled by a power of two first, so that they are equally large, and rounded to whole
    numbers of about half of the bits each.
    """

    def __init__(
        self,
        sides: tuple[Tensor, Tensor],
        multiply: Callable[[Tensor, Tensor], Tensor],  # the sum over samples for other values of both sides
        bounds: Tensor,
        unit: Unit,
        space: Workspace,
        *,
        spread: float = 1.0,  # how often an element of a side is used, at most: the square root of it
        scale: float = 1.0,  # of all products
    ) -> None:
        self._sides, self._multiply, self._scale, self._space = sides, multiply, scale, space
        low = unit.exponent // 2
        self._units = math.ldexp(1.0, low), math.ldexp(1.0, unit.exponent - low)
        self._norms = [row_norms(side) * (1 + _NORM) for side in sides]
        self._rests = [math.sqrt(math.prod(side.shape[1:])) / 2 for side in sides]  # of rounding, in the sides' units
        terms = self._norms[0] * self._norms[1] * abs(scale)
        size = spread * terms
        rests = self._rests[0] * self._units[0], self._rests[1] * self._units[1]
        self.limits = Limits(
            bounds + 2 * _PASSES * size,
            spread * math.sqrt(2) * terms.sqrt() * (rests[0] + rests[1]),
            spread * rests[0] * rests[1],
            size,
        )

    def total(self, weights: Tensor) -> Tensor:
        (left, right), (scale, other), room = self._sides, *self._scales(weights)
        found: Tensor | None = None
        for some in self._portions(room):
            sides = rounded(left[some], scale[some]).double(), rounded(right[some], other[some]).double()
            part = self._multiply(*sides).round_().to(torch.int64)
            found = part if found is None else found.add_(part)
        assert found is not None
        return found

    def _scales(self, weights: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """What to multiply the sides with, and how large a sample's terms then are at most."""
        weights = weights.to(self._norms[0]) * self._scale
        ratio = self._norms[1].log2() - self._norms[0].log2() - weights.abs().log2()
        power = ratio.div_(2).round_().exp2_()
        nothing = ~ratio.isfinite()  # where a side or a weight is zero
        left = (weights * power / self._units[0]).masked_fill_(nothing, 0)
        right = (1 / (power * self._units[1])).masked_fill_(nothing, 0)
        terms = [n * s.abs() + rest for n, s, rest in zip(self._norms, (left, right), self._rests, strict=True)]
        return (left, right), terms[0] * terms[1]

    def _portions(self, room: Tensor) -> Iterator[slice]:
        """As many samples at a time as float64 can add up without rounding, and as memory has room for."""
        each = sum(math.prod(side.shape[1:]) for side in self._sides) * 8
        sizes = room.tolist()
        if not sizes:
            yield slice(0, 0)
        for some in self._space.whole().chunks(len(sizes), each):
            start, filled = some.start, 0.0
            for b in range(some.start, some.stop):
                if filled + sizes[b] >= _WHOLE and b > start:
                    yield slice(start, b)
                    start, filled = b, 0.0
                filled += sizes[b]
            yield slice(start, some.stop)


class Several(Exact):
    """The sum of several terms."""

    def __init__(self, terms: Sequence[Exact], bounds: Tensor) -> None:
        self._terms = terms
        every = Limits.added([term.limits for term in terms])
        # Each term's own bound holds more than rounding; of that the bound of the sum is enough.
        self.limits = Limits(bounds + 4 * _PASSES * every.size, every.root, every.rest, every.size)

    def total(self, weights: Tensor) -> Tensor:
        total = self._terms[0].total(weights)
        for term in self._terms[1:]:
            total += term.total(weights)
        return total


class InParts(Exact):
    """Samples that are made a few at a time, for every question anew."""

    def __init__(self, parts: Sequence[tuple[slice, Callable[[], Exact]]]) -> None:
        self._parts = parts
        every = [make().limits for _, make in parts]
        bound, root, size = (torch.cat(t) for t in zip(*[(x.bound, x.root, x.size) for x in every], strict=True))
        self.limits = Limits(bound, root, every[0].rest, size)

    def total(self, weights: Tensor) -> Tensor:
        (some, make), *others = self._parts
        total = make().total(weights[some])
        for some, make in others:
            total += make().total(weights[some])
        return total


def rounded(rows: Tensor, scales: Tensor) -> Tensor:
    """(B, ...) times scales (B,), to the nearest whole numbers, in float32 or float64."""
    dtype = wide(rows.dtype)
    largest = scales.abs().amax() if len(scales) else scales.sum()
    if dtype != widest(rows.device) and not bool(largest < _IN_RANGE):
        dtype = widest(rows.device)
    each = scales.to(rows.device, dtype).view(-1, *[1] * (rows.ndim - 1))
    return (rows.to(dtype) * each).round_()


def _real(stack: Tensor) -> Tensor:
    if stack.is_complex():
        stack = torch.view_as_real(stack.resolve_conj())
    return stack.reshape(len(stack), math.prod(stack.shape[1:]))
