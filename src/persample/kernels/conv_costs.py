"""What the kernels of `conv_kernels` cost: counts of what they do, and nanoseconds for each.

A kernel's time is a sum of counts times nanoseconds. Which counts there are is a matter of the code; the nanoseconds
were fitted to measurements, one table for each kind of CPU that PyTorch tells apart:
``python -m benchmarks.fit_convolutions`` makes such a table. Only the order of the sums matters.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from persample.kernels.conv_geometry import Geometry
from persample.kernels.conv_kernels import CACHE_BYTES, SHORT_RUN

__all__ = ["TERMS", "Counts", "nanoseconds"]

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
    if c.dtype != torch.float32 or not (c.undilated or (_CAPABILITY == "AVX512" and not c.depthwise)):
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


TERMS: Mapping[str, Callable[[Counts], Terms]] = {"library": _library, "unfold": _unfold, "shifted": _shifted}

# 500 shapes, two threads.
_AVX512 = {
    "library, blocks": {
        "products": 0.011,
        "weights": 0.48,
        "fresh": 0.12,
        "x and dy": 0.34,
        "call": 1.4e5,
        "x and dy of several images": 0.31,
    },
    "library, 3-d": {
        "products": 0.0091,
        "weights": 0.7,
        "fresh": 0,
        "x and dy": 0.61,
        "call": 1.4e5,
        "x and dy of several images": 0,
    },
    "library, depthwise": {
        "products": 0,
        "weights": 0.32,
        "fresh": 0,
        "x and dy": 0.31,
        "call": 1.3e5,
        "x and dy of several images": 0,
    },
    "library, patches": {
        "products": 0.02,
        "weights": 0.47,
        "fresh": 0,
        "x and dy": 0.31,
        "call": 1.3e5,
        "patches": 0.38,
        "runs": 0.91,
        "images": 74,
    },
    "library, double": {
        "products": 0.0064,
        "weights": 1.3,
        "fresh": 0,
        "x and dy": 1.7,
        "call": 7.2e4,
        "patches": 0.77,
        "runs": 0,
        "images": 2.1e3,
    },
    "unfold": {
        "patches": 0,
        "runs": 3.4,
        "fresh patches": 3.5,
        "strided patches": 0.28,
        "products": 0.011,
        "dy": 0.35,
        "matrices": 54,
        "weights": 0.26,
        "steps": 5.2e4,
        "call": 3.2e4,
    },
    "shifted": {
        "lines": 0,
        "runs": 3.8,
        "strided lines": 0.35,
        "operands": 0.11,
        "products": 0.011,
        "small products": 0.057,
        "weights": 0.7,
        "calls": 7.5e3,
        "call": 1.3e5,
    },
}
# 1100 shapes, one thread.
_AVX2 = {
    "library, blocks": {
        "products": 0.028,
        "weights": 1.9,
        "fresh": 2.6,
        "x and dy": 0.59,
        "x and dy of several images": 0.24,
        "call": 2.0e5,
    },
    "library, 3-d": {
        "products": 0.066,
        "weights": 1.9,
        "fresh": 2.6,
        "x and dy": 0.59,
        "x and dy of several images": 0.24,
        "call": 2.0e5,
    },
    "library, depthwise": {
        "products": 0.028,
        "weights": 1.9,
        "fresh": 2.6,
        "x and dy": 0.59,
        "x and dy of several images": 0.24,
        "call": 2.0e5,
    },
    "library, patches": {
        "products": 0.026,
        "patches": 1.15,
        "runs": 2.2,
        "images": 110,
        "weights": 1,
        "fresh": 1,
        "x and dy": 0.29,
        "call": 2.6e5,
    },
    "library, double": {
        "products": 0.043,
        "patches": 0.94,
        "runs": 4.8,
        "images": 2.7e3,
        "weights": 2.7,
        "fresh": 1.3,
        "x and dy": 1.4,
        "call": 1.7e5,
    },
    "unfold": {
        "patches": 0.46,
        "runs": 9.1,
        "fresh patches": 0.77,
        "strided patches": 0.75,
        "products": 0.016,
        "dy": 0.29,
        "matrices": 26,
        "weights": 0.56,
        "steps": 1.7e4,
        "call": 8.9e4,
    },
    "shifted": {
        "lines": 0.09,
        "runs": 9.6,
        "strided lines": 1.25,
        "operands": 0.21,
        "products": 0.026,
        "small products": 0.58,
        "weights": 2.4,
        "calls": 1.1e4,
        "call": 2.5e5,
    },
}
_CAPABILITY = torch.backends.cpu.get_cpu_capability()


def nanoseconds(kernel: str, c: Counts) -> float:
    """About how long a kernel takes."""
    way, terms = TERMS[kernel](c)
    each = (_AVX512 if _CAPABILITY == "AVX512" else _AVX2)[way]
    return sum(each[name] * count for name, count in terms.items())
