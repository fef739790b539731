"""The geometry of a convolution, and which kernel of `convolution` suits it.

Each kernel's time is a sum of counts times nanoseconds (float32, one core with AVX2). Only the order of the
sums matters: on 197 random shapes that had no part in the fit, the choice took 1.07 times the best kernel's time
on average, and more than 1.3 times on 6% of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["CACHE_BYTES", "Geometry", "applicable", "choose"]

CACHE_BYTES = 2**21  # temporaries up to here are rewritten in place, without a trip to memory
_FRESH_BYTES = 2**24  # an allocation from here on is new pages every time


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a convolution walks over its input; every tuple has one entry per spatial dim."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def arguments(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, tuple[int, ...], int]:
        """In the order in which PyTorch's convolutions take them."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def read_size(self, out_size: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """s·(O - 1) + δ·(k - 1) + 1: how much of the padded input the outputs read, not transposed."""
        return tuple(
            s * (n - 1) + d * (k - 1) + 1
            for s, n, d, k in zip(self.stride, out_size, self.dilation, kernel, strict=True)
        )

    def output_size(self, in_size: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """⌊(S + 2·padding - δ·(k - 1) - 1) / s⌋ + 1: the output's spatial size, not transposed."""
        return tuple(
            (n + 2 * pad - d * (k - 1) - 1) // s + 1
            for n, pad, d, k, s in zip(in_size, self.padding, self.dilation, kernel, self.stride, strict=True)
        )


@dataclass(frozen=True, slots=True)
class _Counts:
    """What the cost of a kernel is made of; letters as in `convolution`."""

    B: int
    R: int
    G: int
    p: int
    d: int
    kernel: tuple[int, ...]
    in_size: tuple[int, ...]
    out_size: tuple[int, ...]
    geometry: Geometry
    dtype: torch.dtype

    @property
    def K(self) -> int:
        """Offsets in the kernel."""
        return math.prod(self.kernel)

    @property
    def T(self) -> int:
        """Output positions of one sample."""
        return self.R * math.prod(self.out_size)

    @property
    def weights(self) -> int:
        """Elements of the result."""
        return self.B * self.G * self.p * self.d * self.K

    @property
    def patches(self) -> int:
        """Elements of the unfolded input."""
        return self.B * self.G * self.d * self.K * self.T

    @property
    def page_faults(self) -> float:
        """What a result of fresh pages costs on top of the writing."""
        return 2.6 * self.weights if self.weights * self.dtype.itemsize > _FRESH_BYTES else 0.0

    @property
    def jit(self) -> bool:
        """Whether the library has a vectorised kernel: 8 channels at a time, or small depthwise ones."""
        if self.dtype != torch.float32 or len(self.kernel) > 2:
            return False
        small = max(self.kernel) <= 3 and max(self.geometry.dilation) == 1
        return small if self.p == self.d == 1 else self.p % 8 == self.d % 8 == 0


def _library(c: _Counts) -> float:
    """Vectorised, or else an im2col and a GEMM for each image and group; R > 1 costs a transposed copy.

    The result is written twice, in the library's own channel order and in ours.
    """
    x_and_dy = c.B * c.G * (c.R * c.d * math.prod(c.in_size) + c.p * c.T)
    common = 1.3 * c.weights + 2 * c.page_faults + (0.9 if c.R > 1 else 0.5) * x_and_dy + 2.3e5
    if c.jit:
        return common + 0.039 * c.weights * c.T
    return common + 0.023 * c.weights * c.T + 1.8 * c.patches + 530 * c.B * c.G * c.R


def _unfold(c: _Counts) -> float:
    """Copies patches row by row, and then runs the best GEMM of all."""
    copy = 0.43 + 13 / c.out_size[-1]
    if c.patches // c.B * c.dtype.itemsize > _FRESH_BYTES:
        copy += 1.8
    gemm = 0.027 * c.weights * c.T + c.B * c.G * (c.p * c.T + 110)
    return copy * c.patches + gemm + 0.7 * c.weights + c.page_faults + 1.4e5


def _shifted(c: _Counts) -> float:
    """K thin GEMMs that each read x and dy again, zeros included, and a transposed copy of the result."""
    length = c.R * math.prod(c.geometry.read_size(c.out_size, c.kernel))
    reads = c.K * c.B * c.G * (0.23 * c.d + 0.55 * c.p) * length
    gemms = 0.035 * c.weights * length + reads + c.K * (32 * c.B * c.G + 3.3e4)
    return gemms + 2.75 * c.weights + c.page_faults


_COSTS = {"library": _library, "unfold": _unfold, "shifted": _shifted}


def applicable(weight_size: Sequence[int], geometry: Geometry) -> tuple[str, ...]:
    """The kernels that can do this convolution."""
    names = ["library", "unfold"]
    if all(s == 1 for s in geometry.stride):
        names.append("shifted")
    if math.prod(weight_size[2:]) == 1:
        names.append("pointwise")
    return tuple(names)


def choose(
    samples: int,
    images: int,
    weight_size: Sequence[int],
    x_size: Sequence[int],
    dy_size: Sequence[int],
    geometry: Geometry,
    dtype: torch.dtype = torch.float32,
) -> str:
    """The name of the kernel with the least estimated time; x_size and dy_size are the spatial sizes."""
    names = applicable(weight_size, geometry)
    if "pointwise" in names:
        return "pointwise"
    if not samples * images * math.prod((*weight_size, *x_size, *dy_size)):
        return "unfold"
    in_size, out_size = (dy_size, x_size) if geometry.transposed else (x_size, dy_size)
    counts = _Counts(
        B=samples,
        R=images,
        G=geometry.groups,
        p=weight_size[0] // geometry.groups,
        d=weight_size[1],
        kernel=tuple(weight_size[2:]),
        in_size=tuple(in_size),
        out_size=tuple(out_size),
        geometry=geometry,
        dtype=dtype,
    )
    return min(names, key=lambda name: _COSTS[name](counts))
