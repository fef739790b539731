"""Which kernel of `conv_kernels` suits a convolution.

Each kernel's time is a sum of counts times nanoseconds, fitted to measurements of about 1100 shapes (one core with
AVX2, others busy). Only the order of the sums matters. On the 80 shapes of `python -m benchmarks.convolutions` the
choice took 1.01 to 1.02 times the best kernel's time on average, and more than 1.15 times on 3 of them with one thread
and on 5 with two; on 150 random shapes that had no part in the fit, 1.04 times, and more than 1.15 times on 9%.
`explain_choice` shows the sums, and `use_kernel` overrides them.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from persample.kernels.conv_geometry import Geometry
from persample.kernels.conv_kernels import CACHE_BYTES, SHORT_RUN

__all__ = ["Choice", "applicable", "choose", "explain_choice", "is_measuring", "measure", "use_kernel"]

_FRESH_BYTES = 2**24  # an allocation from here on may be new pages every time
_SMALL_PRODUCT = 400  # multiplications; below, PyTorch does not call BLAS
_MEASURED = "measured"
_preferred: str | None = None  # see `use_kernel`
# samples, images, sizes of weight, x and dy, geometry, dtype
Key = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], Geometry, torch.dtype]
_fastest: dict[Key, str] = {}  # of those that were measured


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel for a convolution, and the time that each applicable one was estimated to take."""

    kernel: str
    milliseconds: Mapping[str, float]


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
    def vectorised(self) -> bool:
        """Whether the library has a kernel for it: 8 channels at a time, or small depthwise ones."""
        if self.dtype != torch.float32 or max(self.geometry.dilation) > 1:
            return False
        if self.p == self.d == 1 < self.matrices:
            return len(self.kernel) <= 2 and max(self.kernel) <= 3 and max(self.geometry.stride) <= 2
        return self.p % 8 == self.d % 8 == 0 or self.matrices == 1


def _library(c: _Counts) -> float:
    """Vectorised, or else an im2col and a GEMM for each image and group; float64 takes a call for each group.

    The result is written twice, in the library's own order and in ours; R > 1 costs transposed copies.
    """
    x_and_dy = c.matrices * (c.R * c.d * math.prod(c.in_size) + c.p * c.T)
    fresh = c.weights if c.weights * c.dtype.itemsize > _FRESH_BYTES else 0
    if c.vectorised:
        products = (0.066 if len(c.kernel) == 3 else 0.028) * c.products
        return products + 1.9 * c.weights + 2.6 * fresh + (0.83 if c.R > 1 else 0.59) * x_and_dy + 2.0e5
    if c.dtype == torch.float32:
        gemm = 0.026 * c.products + (1.15 + 2.2 / c.run) * c.patches + 110 * c.matrices * c.R
        return gemm + c.weights + fresh + 0.29 * x_and_dy + 2.6e5
    gemm = 0.043 * c.products + (0.94 + 4.8 / c.run) * c.patches + 2.7e3 * c.matrices * (1 + c.R)
    return gemm + 2.7 * c.weights + 1.3 * fresh + 1.4 * x_and_dy + 1.7e5


def _unfold(c: _Counts) -> float:
    """Copies patches, run by run, and then runs the best GEMM of all."""
    copy = 0.46 * c.width + 9.1 / c.run
    if c.patches // c.B * c.dtype.itemsize > _FRESH_BYTES:
        copy += 0.77
    if c.geometry.stride[-1] > 1:
        copy += 0.75
    gemm = 0.016 * c.products + c.matrices * (0.29 * c.width * c.p * c.T + 26)
    return copy * c.patches + gemm + 0.56 * c.width * c.weights + 1.7e4 * c.steps(c.patches) + 8.9e4


def _shifted(c: _Counts) -> float:
    """Copies lines, runs GEMMs that each read them and dy again, and copies the result."""
    first, rest = c.kernel[0], c.K // c.kernel[0]
    copy = 0.09 * c.width if c.R > 1 or rest > 1 or c.geometry.stride[0] > 1 else 0.0
    copy += 9.6 / c.run * (rest > 1) + 1.25 * (c.geometry.stride[-1] > 1)
    reads = 0.21 * first * c.matrices * (c.p + c.d * rest) * c.T
    small = c.p * c.d * rest * c.T < _SMALL_PRODUCT
    gemm = (0.58 if small else 0.026) * c.products + reads * c.width
    calls = first * (1 + rest / 2 if rest < SHORT_RUN else 1) * c.steps(max(c.lines, c.weights))
    return copy * c.lines + gemm + 2.4 * c.width * c.weights + 1.1e4 * calls + 2.5e5


_COSTS = {"library": _library, "unfold": _unfold, "shifted": _shifted}


def applicable(weight_size: Sequence[int]) -> tuple[str, ...]:
    """The kernels that can do this convolution."""
    pointwise = math.prod(weight_size[2:]) == 1
    return ("library", "unfold", "shifted", "pointwise") if pointwise else ("library", "unfold", "shifted")


def choose(
    samples: int,
    images: int,
    weight_size: Sequence[int],
    x_size: Sequence[int],
    dy_size: Sequence[int],
    geometry: Geometry,
    dtype: torch.dtype = torch.float32,
) -> str:
    """The name of the kernel that `weight_per_sample` takes; x_size and dy_size are the spatial sizes."""
    return explain_choice(samples, images, weight_size, x_size, dy_size, geometry, dtype).kernel


def explain_choice(
    samples: int,
    images: int,
    weight_size: Sequence[int],
    x_size: Sequence[int],
    dy_size: Sequence[int],
    geometry: Geometry,
    dtype: torch.dtype = torch.float32,
) -> Choice:
    """The same with the estimates that led to it.

    >>> geometry = Geometry((1, 1), (1, 1), (1, 1), transposed=False, output_padding=(0, 0), groups=1)
    >>> choice = explain_choice(32, 1, (256, 256, 3, 3), (4, 4), (4, 4), geometry)
    >>> choice.kernel, sorted(choice.milliseconds)
    ('unfold', ['library', 'shifted', 'unfold'])
    """
    key = samples, images, tuple(weight_size), tuple(x_size), tuple(dy_size), geometry, dtype
    milliseconds = _estimates(*key)
    if is_measuring() and key in _fastest:
        return Choice(_fastest[key], milliseconds)
    if _preferred in applicable(weight_size):
        return Choice(_preferred, milliseconds)
    if "pointwise" in applicable(weight_size):
        return Choice("pointwise", milliseconds)
    return Choice(min(milliseconds, key=milliseconds.__getitem__), milliseconds)


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Inside, take this kernel for every convolution that it can do, in all threads.

    "measured" times all kernels at the first convolution of each shape, and takes the fastest from then on. Results may
    then differ in their last digits from run to run.

    >>> geometry = Geometry((1, 1), (1, 1), (1, 1), transposed=False, output_padding=(0, 0), groups=1)
    >>> with use_kernel("library"):
    ...     choose(32, 1, (256, 256, 3, 3), (4, 4), (4, 4), geometry)
    'library'
    """
    global _preferred
    if name not in (_MEASURED, "pointwise", *_COSTS):
        raise ValueError(f"there is no kernel {name!r}; choose from {(_MEASURED, 'pointwise', *_COSTS)}")
    before, _preferred = _preferred, name
    try:
        yield
    finally:
        _preferred = before


def is_measuring() -> bool:
    """Are kernels to be timed?"""
    return _preferred == _MEASURED


def measure(key: Key, run: Callable[[str], object]) -> str:
    """The fastest kernel for convolutions of this kind: ``run`` calls the one that it is given."""
    if key not in _fastest:
        _fastest[key] = min(applicable(key[2]), key=lambda name: min(_seconds(run, name) for _ in range(3)))
    return _fastest[key]


def _seconds(run: Callable[[str], object], name: str) -> float:
    start = time.perf_counter()
    run(name)
    return time.perf_counter() - start


@lru_cache(maxsize=1024)
def _estimates(
    samples: int,
    images: int,
    weight_size: tuple[int, ...],
    x_size: tuple[int, ...],
    dy_size: tuple[int, ...],
    geometry: Geometry,
    dtype: torch.dtype,
) -> Mapping[str, float]:
    """Milliseconds by kernel; none if there is nothing to do."""
    if not samples * images * math.prod((*weight_size, *x_size, *dy_size)):
        return dict.fromkeys(_COSTS, 0.0)
    in_size, out_size = (dy_size, x_size) if geometry.transposed else (x_size, dy_size)
    counts = _Counts(
        B=samples,
        R=images,
        G=geometry.groups,
        p=weight_size[0] // geometry.groups,
        d=weight_size[1],
        kernel=weight_size[2:],
        in_size=in_size,
        out_size=out_size,
        geometry=geometry,
        dtype=dtype,
    )
    return {name: 1e-6 * cost(counts) for name, cost in _COSTS.items()}
