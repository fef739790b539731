"""How much a sample adds at most, and in which unit: bounds that hold for all data.

They are those of rounding errors in sums of products, in whatever order (Higham, Accuracy and Stability of Numerical
Algorithms, chapter 3), and not what is usual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.norms import row_norms, wide

_BITS = 42  # a unit is smaller than its bound by so many powers of two, at most
_FEWEST_BITS = 40  # with less, sums are kept in int64
WHOLE = 53  # bits of whole numbers that are exact in float64
_LONG = 62  # bits of a sum in int64, with room to spare
_RATIO = 2.0**9  # how much larger than a bound the terms of one sample's share may be
NORM = 2.0**-15  # the relative error of a norm: runs of 512 squares in float32
_WIDE_NORM = 2.0**-22  # the same in float64, of up to 2**30 squares


@dataclass(frozen=True)
class Unit:
    """A power of two, 2**exponent, of which all shares are whole numbers, far below a public bound; and what holds
    their sum without rounding: float64, or int64 where there are too many samples."""

    exponent: int
    dtype: torch.dtype = torch.int64

    @classmethod
    def below(cls, bound: float, samples: int) -> Unit:
        """For the sum of so many samples' shares, each at most the bound."""
        top, bits = math.frexp(bound)[1], samples.bit_length()
        if WHOLE - bits >= _FEWEST_BITS:
            return cls(top - min(_BITS, WHOLE - bits), torch.float64)
        return cls(top - min(_BITS, _LONG - bits))

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
    def together(cls, every: Sequence[tuple[Limits, int]]) -> Limits:
        """Of several parameters as one vector, some of which are parts of one factor: so many, of equal size."""
        bound = torch.cat([x.bound.view(parts, -1) for x, parts in every])
        root = torch.cat([x.root.view(parts, -1) for x, parts in every])
        size = torch.cat([x.size.view(parts, -1) for x, parts in every]).amax(0)
        rest = math.sqrt(math.fsum(parts * x.rest**2 for x, parts in every))
        return cls(row_norms(bound.t()), row_norms(root.t()), rest, size)

    @classmethod
    def added(cls, every: Sequence[Limits]) -> Limits:
        """Of several terms of one gradient."""
        bound, root, size = (
            torch.stack(t).sum(0) for t in zip(*[(x.bound, x.root, x.size) for x in every], strict=True)
        )
        return cls(bound, root, math.fsum(x.rest for x in every), size)

    def times(self, weights: Tensor) -> Limits:
        """The same of gradients that are weighted already."""
        return Limits(self.bound * weights, self.root * weights.sqrt(), self.rest, self.size * weights)

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
    return 1 + 2 * (_WIDE_NORM if wide(dtype).to_real() == torch.float64 else NORM)


def gram_bounds(norms: Tensor, sizes: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """(B,): at least the norms that were found from Gram matrices, whose elements are sums of ``terms`` products."""
    squares = norms.square() + 2 * roundoff(dtype, terms + 8) * sizes.square()
    return squares.sqrt() * norm_error(dtype)
