"""Bounds that hold for all data: the unit of an integer sum, and how much one sample can add to it.

The bounds are those of rounding errors in sums of products, in whatever order (Higham, Accuracy and Stability of
Numerical Algorithms, chapter 3), and not what is usual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.norms import row_norms, wide

WHOLE = 53  # bits of whole numbers that are exact in float64
_BITS = 42  # a unit is at most so many powers of two smaller than its bound
_FEWEST_BITS = 40  # if fewer are left in float64, sums are kept in int64
_INT64_BITS = 62  # bits of a sum in int64, with room to spare
_LARGEST_TERMS = 2.0**9  # how many times larger than the bound the terms of one sample may be
NORM_ERROR = 2.0**-15  # the relative error of a norm: runs of 512 squares in float32
_FLOAT64_NORM_ERROR = 2.0**-22  # the relative error of a norm in float64, of up to 2**30 squares


@dataclass(frozen=True)
class Unit:
    """The unit of an integer sum, 2**exponent, and a dtype that holds the sum without rounding.

    Every sample adds a whole number of units. The unit is far below the bound of what a sample may add. The dtype is
    float64, or int64 where there are too many samples for it.
    """

    exponent: int
    dtype: torch.dtype = torch.int64

    @classmethod
    def below(cls, bound: float, samples: int) -> Unit:
        """The unit for a sum over so many ``samples``, each of which adds at most ``bound``."""
        top, bits = math.frexp(bound)[1], samples.bit_length()
        if WHOLE - bits >= _FEWEST_BITS:
            return cls(top - min(_BITS, WHOLE - bits), torch.float64)
        return cls(top - min(_BITS, _INT64_BITS - bits))

    @property
    def size(self) -> float:
        """2**exponent."""
        return math.ldexp(1.0, self.exponent)


@dataclass(frozen=True)
class Limits:
    """What each sample can add to an integer sum: with weight w at most ``w · linear + √w · root + constant``.

    The terms that are added up for it, which may cancel, are at most ``w · terms``.
    """

    linear: Tensor  # (B,)
    root: Tensor  # (B,)
    constant: float | Tensor  # (B,) where samples differ
    terms: Tensor  # (B,)

    @classmethod
    def concatenated(cls, every: Sequence[tuple[Limits, int]]) -> Limits:
        """Limits of the gradients of several parameters, seen as one vector.

        Each of ``every`` comes with a number of parameters whose limits it holds one after another.
        """
        linear = torch.cat([x.linear.view(parts, -1) for x, parts in every])
        root = torch.cat([x.root.view(parts, -1) for x, parts in every])
        terms = torch.cat([x.terms.view(parts, -1) for x, parts in every]).amax(0)
        constant = _root(_added([parts * x.constant**2 for x, parts in every]))
        return cls(row_norms(linear.t()), row_norms(root.t()), constant, terms)

    @classmethod
    def summed(cls, every: Sequence[Limits]) -> Limits:
        """Limits of the sum of several terms of one gradient."""
        linear, root, terms = (
            torch.stack(t).sum(0) for t in zip(*[(x.linear, x.root, x.terms) for x in every], strict=True)
        )
        return cls(linear, root, _added([x.constant for x in every]), terms)

    def weighted(self, weights: Tensor) -> Limits:
        """Limits of these gradients times ``weights``: what is left to choose is a further weight."""
        return Limits(self.linear * weights, self.root * weights.sqrt(), self.constant, self.terms * weights)

    def largest_weights(self, bound: float | Tensor) -> Tensor:
        """(B,): the largest weights with which no sample adds more than ``bound``, which may be a graph's number."""
        left = bound * (1 - 2.0**-40) - self.constant
        room = left.clamp(min=0) if isinstance(left, Tensor) else max(left, 0.0)
        root = 2 * room / (self.root + (self.root.square() + 4 * room * self.linear).sqrt())
        return torch.minimum(root.square(), _LARGEST_TERMS * bound / self.terms).nan_to_num(nan=0.0, posinf=math.inf)


def _added(numbers: Sequence[float | Tensor]) -> float | Tensor:
    """The sum of numbers, or of one for every sample."""
    if not any(isinstance(number, Tensor) for number in numbers):
        return math.fsum(numbers)
    total: float | Tensor = 0.0
    for number in numbers:
        total = total + number
    return total


def _root(number: float | Tensor) -> float | Tensor:
    return number.sqrt() if isinstance(number, Tensor) else math.sqrt(number)


def roundoff(dtype: torch.dtype, terms: int = 1) -> float:
    """The relative error of a sum of so many products, in whatever order, in float32 or wider."""
    each = torch.finfo(wide(dtype).to_real()).eps / 2
    return (terms + 4) * each / (1 - (terms + 4) * each)


def norm_error(dtype: torch.dtype) -> float:
    """What a norm of gradients of that dtype has to be multiplied by to be at least the exact norm."""
    return 1 + 2 * (_FLOAT64_NORM_ERROR if wide(dtype).to_real() == torch.float64 else NORM_ERROR)


def gram_bounds(norms: Tensor, term_norms: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """(B,): upper bounds of ``norms`` from Gram matrices, whose elements are sums of ``terms`` products."""
    squares = norms.square() + 2 * roundoff(dtype, terms + 8) * term_norms.square()
    return squares.sqrt() * norm_error(dtype)
