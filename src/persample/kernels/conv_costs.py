"""What per-sample gradients of convolutions cost, by each kernel of `conv_kernels`, and their norms and their sum.

A time is a sum of counts times nanoseconds. Which counts there are is a matter of the code, and is written here; the
nanoseconds are those of `conv_rates`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from persample.kernels.conv_geometry import Geometry
from persample.kernels.conv_kernels import CACHE_BYTES, FEW_CHANNELS, SHORT_RUN
from persample.kernels.conv_rates import RATES
from persample.kernels.gram import BLOCK

__all__ = ["KERNEL_TERMS", "NORM_TERMS", "TERMS", "Counts", "nanoseconds"]

_FRESH_BYTES = 2**24  # an allocation from here on may be new pages every time
_SMALL_PRODUCT = 400  # multiplications; below, PyTorch does not call BLAS

Terms = tuple[str, dict[str, float]]  # the way that a kernel takes, and what it does on it how often


@dataclass(frozen=True, slots=True)
class Counts:
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
    table: str  # of `conv_rates`: the kind of CPU

    @property
    def K(self) -> int:
        """Offsets in the kernel."""
        return math.prod(self.kernel)

    @property
    def T(self) -> int:
        """Output positions of one sample."""
        return self.R * math.prod(self.out_size)

    @property
    def matrices(self) -> int:
        """One for each sample and group."""
        return self.B * self.G

    @property
    def weights(self) -> int:
        """Elements of the result."""
        return self.matrices * self.p * self.d * self.K

    @property
    def products(self) -> float:
        """Multiplications, those of float64 counted twice."""
        return self.weights * self.T * self.width

    @property
    def patches(self) -> int:
        """Elements of the unfolded input."""
        return self.matrices * self.d * self.K * self.T

    @property
    def lines(self) -> int:
        """Elements of the input unfolded on all axes but the first."""
        stride, reach = self.geometry.stride[0], self.geometry.read_size(self.out_size, self.kernel)[0]
        length = (reach + -reach % stride) * self.T // self.out_size[0]
        return self.matrices * self.d * self.K // self.kernel[0] * length

    @property
    def run(self) -> int:
        """How many elements of patches are copied at a time: the length of the innermost axis that has any."""
        axes = (*self.out_size[::-1], self.R, *self.kernel[::-1])
        return next((n for n in axes if n > 1), 1)

    @property
    def width(self) -> float:
        """Of an element, beside float32."""
        return self.dtype.itemsize / 4

    def steps(self, elements: int) -> int:
        """In how many steps the batch is done if it has so many elements of temporaries."""
        each = CACHE_BYTES * self.B // (elements * self.dtype.itemsize)
        return math.ceil(self.B / max(1, each))

    @property
    def depthwise(self) -> bool:
        """One channel in each group."""
        return self.p == self.d == 1 < self.matrices

    @property
    def undilated(self) -> bool:
        """Whether kernels have no holes."""
        return max(self.geometry.dilation) == 1


def _library(c: Counts) -> Terms:
    """Vectorised, or else an im2col and a GEMM for each image and group; float64 takes a call for each group.

    The result is written twice, in the library's own order and in ours; R > 1 costs transposed copies.
    """
    x_and_dy = c.matrices * (c.R * c.d * math.prod(c.in_size) + c.p * c.T)
    fresh = c.weights if c.weights * c.dtype.itemsize > _FRESH_BYTES else 0
    both = {"products": c.products, "weights": c.weights, "fresh": fresh, "x and dy": x_and_dy, "call": 1}
    if _is_vectorised(c):
        kind = "depthwise" if c.depthwise else "3-d" if len(c.kernel) == 3 else "blocks"
        return f"library, {kind}", {**both, "x and dy of several images": x_and_dy if c.R > 1 else 0}
    patches = {"patches": c.patches, "runs": c.patches / c.run}
    if c.dtype == torch.float32:
        return "library, patches", {**both, **patches, "images": c.matrices * c.R}
    return "library, double", {**both, **patches, "images": c.matrices * (1 + c.R)}


def _is_vectorised(c: Counts) -> bool:
    """Whether the library has a kernel for it: 8 channels at a time, or small depthwise ones."""
    if c.dtype != torch.float32 or not (c.undilated or (c.table == "AVX512" and not c.depthwise)):
        return False
    if c.depthwise:
        return len(c.kernel) <= 2 and max(c.kernel) <= 3 and max(c.geometry.stride) <= 2
    return c.p % 8 == c.d % 8 == 0 or c.matrices == 1


def _unfold(c: Counts) -> Terms:
    """Copies patches, run by run, and then runs the best GEMM of all."""
    return "unfold", {
        "patches": c.width * c.patches,
        "runs": c.patches / c.run,
        "fresh patches": c.patches if c.patches // c.B * c.dtype.itemsize > _FRESH_BYTES else 0,
        "strided patches": c.patches if c.geometry.stride[-1] > 1 else 0,
        "products": c.products,
        "dy": c.width * c.matrices * c.p * c.T,
        "matrices": c.matrices,
        "weights": c.width * c.weights,
        "steps": c.steps(c.patches),
        "call": 1,
    }


def _shifted(c: Counts) -> Terms:
    """Copies lines, runs GEMMs that each read them and dy again, and copies the result."""
    if c.geometry.stride[0] > 1 and c.geometry.dilation[0] > 1:
        return _unfold(c)
    phases = c.geometry.stride[0]
    gemms, rest = -(-c.kernel[0] // phases), c.K // c.kernel[0]
    copied = c.R > 1 or rest > 1 or phases > 1
    run = rest * phases
    small = c.p * c.d * run * c.T < _SMALL_PRODUCT
    products = c.products * gemms * phases / c.kernel[0]  # with those that are left away at the end
    return "shifted", {
        "lines": c.width * c.lines if copied else 0,
        "runs": c.lines / c.run if copied else 0,
        "strided lines": c.lines if c.geometry.stride[-1] > 1 else 0,
        "operands": c.width * gemms * c.matrices * (c.p + c.d * run) * c.T,
        "products": 0 if small else products,
        "small products": products if small else 0,
        "weights": c.width * c.weights,
        "calls": gemms * (1 + run / 2 if run < SHORT_RUN else 1) * c.steps(max(c.lines, c.weights)),
        "call": 1,
    }


def _forward(c: Counts) -> Terms:
    """Vectorised for one channel, or for many, if it is not float64; the result is in the right order."""
    kind = "depthwise" if c.p == 1 else "blocks" if c.p % 16 == 0 else "other"
    return "forward, double" if c.dtype != torch.float32 else f"forward, {kind}", {
        "products": c.products,
        "x and dy": c.width * c.matrices * (c.R * c.d * math.prod(c.in_size) + c.p * c.T),
        "weights": c.width * c.weights,
        "matrices": c.matrices,
        "call": 1,
    }


def _positions(c: Counts) -> Terms:
    """Copies patches, channels last, multiplies, and takes norms of the products in the order in which they come."""
    return _by_position("positions", c), {
        **_patches_by_position(c),
        "products": c.products,
        "dy": c.width * c.matrices * c.p * c.T,
        "matrices": c.matrices,
        "weights": c.width * c.weights,
        "steps": c.steps(max(c.patches, c.weights)),
        "call": 1,
    }


def _patch_gram(c: Counts) -> Terms:
    """Copies patches in the same way, and multiplies them and dy with themselves."""
    pairs = c.matrices * c.T * (c.T + min(c.T, BLOCK)) / 2
    return _by_position("patch gram", c), {
        **_patches_by_position(c),
        "products": c.width * pairs * (c.p + c.d * c.K),
        "dy": c.width * c.matrices * c.p * c.T,
        "matrices": c.matrices,
        "pairs": c.width * pairs,
        "blocks": -(-c.T // BLOCK) * c.steps(c.patches),
        "call": 1,
    }


def _by_position(way: str, c: Counts) -> str:
    return f"{way}, few channels" if c.d < FEW_CHANNELS else way


def _patches_by_position(c: Counts) -> dict[str, float]:
    several = c.d >= FEW_CHANNELS
    run = c.d * (c.kernel[-1] if c.geometry.dilation[-1] == 1 else 1) if several else c.run
    return {
        "x": c.width * c.matrices * c.R * c.d * math.prod(c.in_size),
        "patches": c.width * c.patches,
        "runs": c.patches / run,
        "strided patches": c.patches if c.geometry.stride[-1] > 1 and not several else 0,
    }


def _pixel_gram(c: Counts) -> Terms:
    """Multiplies pixels and dy with themselves, and adds up the former along the diagonals, one axis after another."""
    pixels = c.R * math.prod(c.geometry.read_size(c.out_size, c.kernel))
    pairs, positions = c.matrices * pixels * (pixels + min(pixels, 2 * BLOCK)) / 2, c.matrices * c.T * c.T
    return "pixel gram", {
        "products": c.width * (pairs * c.d + positions * c.p / 2),
        "pixels": c.width * pairs * sum(c.kernel),
        "pairs": c.width * positions,
        "matrices": c.matrices,
        "lines": c.out_size[0],
        "call": 1,
    }


def _sum(c: Counts) -> Terms:
    """The library's gradient of all samples together."""
    kind = "blocks" if _is_vectorised(c) and not c.depthwise else "depthwise" if c.depthwise else "patches"
    x_and_dy = c.matrices * (c.R * c.d * math.prod(c.in_size) + c.p * c.T)
    return f"sum, {kind}", {"products": c.products, "x and dy": c.width * x_and_dy, "call": 1}


Formula = Callable[[Counts], Terms]
KERNEL_TERMS: Mapping[str, Formula] = {
    "library": _library,
    "unfold": _unfold,
    "shifted": _shifted,
    "forward": _forward,
}
NORM_TERMS: Mapping[str, Formula] = {"positions": _positions, "patches": _patch_gram, "pixels": _pixel_gram}
TERMS: Mapping[str, Formula] = {**KERNEL_TERMS, **NORM_TERMS, "sum": _sum}


def nanoseconds(what: str, c: Counts) -> float:
    """About how long a kernel takes, or one of the ways to norms, or the sum over all samples."""
    way, terms = TERMS[what](c)
    each = RATES[c.table][way]
    return sum(each[name] * count for name, count in terms.items())
