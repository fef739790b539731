"""Which kernel of `conv_kernels` suits a convolution, and which way to norms: what costs least by `conv_costs`.

``python -m benchmarks.convolutions`` measures how good the choices are, on 80 shapes that had no part in the fit, but
for one correction by hand. On a CPU with AVX-512, 74 of the kernels (two threads) and 76 (one) were at most 15% slower
than the best one, and with ``--norms`` 75 and 78 of the ways to norms; on average, the choice took 1.01 to 1.03 times
the best time. `explain_choice` shows the estimates and which CPU's costs they are made of; `use_kernel` overrides them,
and `use_costs` makes them those of another CPU.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from persample.kernels.conv_costs import KERNEL_TERMS, NORM_TERMS, Counts, nanoseconds
from persample.kernels.conv_geometry import Geometry
from persample.kernels.conv_kernels import FEW_CHANNELS
from persample.kernels.conv_rates import RATES, table_for

__all__ = [
    "Choice",
    "applicable",
    "choose",
    "choose_norms",
    "counts_of",
    "explain_choice",
    "is_measuring",
    "keeps_stack",
    "measure",
    "norm_estimates",
    "use_costs",
    "use_kernel",
]

_MEASURED = "measured"
# Nanoseconds for an element of a stack whose norms are taken while it is in cache, or later, and added up; and a call.
_NORM, _KEPT, _CALL = 0.14, 0.6, 3.5e4
_CPU = torch.backends.cpu.get_cpu_capability()
_table = table_for(_CPU)  # see `use_costs`
_preferred: str | None = None  # see `use_kernel`
# samples, images, sizes of weight, x and dy, geometry, dtype
Key = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], Geometry, torch.dtype]
_fastest: dict[Key, str] = {}  # of those that were measured


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel for a convolution, the time that each applicable one was estimated to take, and by whose costs."""

    kernel: str
    milliseconds: Mapping[str, float]
    costs: str


def applicable(weight_size: Sequence[int]) -> tuple[str, ...]:
    """The kernels that can do this convolution."""
    special = {"forward": weight_size[1] == 1, "pointwise": math.prod(weight_size[2:]) == 1}
    return ("library", "unfold", "shifted", *[name for name, can in special.items() if can])


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
    >>> with use_costs("AVX512"):
    ...     choice = explain_choice(32, 1, (256, 256, 3, 3), (4, 4), (4, 4), geometry)
    >>> choice.kernel, sorted(choice.milliseconds), choice.costs
    ('unfold', ['library', 'shifted', 'unfold'], 'AVX512...')
    """
    key = samples, images, tuple(weight_size), tuple(x_size), tuple(dy_size), geometry, dtype
    milliseconds, costs = _estimates(*key), _whose_costs()
    if is_measuring() and key in _fastest:
        return Choice(_fastest[key], milliseconds, costs)
    if _preferred in applicable(weight_size):
        return Choice(_preferred, milliseconds, costs)
    if "pointwise" in applicable(weight_size):
        return Choice("pointwise", milliseconds, costs)
    return Choice(min(milliseconds, key=milliseconds.__getitem__), milliseconds, costs)


def _whose_costs() -> str:
    """The kind of CPU that estimates were fitted to, and whether that is this one."""
    if _table == _CPU:
        return _table
    if _CPU in RATES:
        return f"{_table}, though this CPU is {_CPU}"
    return f"{_table}, for want of any fitted to {_CPU} (python -m benchmarks.fit_convolutions)"


@contextmanager
def use_costs(table: str) -> Iterator[None]:
    """Inside, choose as a CPU of this kind does, in all threads: what is chosen does not depend on the machine.

    >>> with use_costs("AVX2"):
    ...     geometry = Geometry((1, 1), (2, 2), (2, 2), transposed=False, output_padding=(0, 0), groups=1)
    ...     choose(64, 1, (16, 16, 3, 3), (32, 32), (32, 32), geometry)
    'shifted'
    """
    global _table
    if table not in RATES:
        raise ValueError(f"no costs were fitted to {table!r}; choose from {tuple(RATES)}")
    before, _table = _table, table
    _forget_estimates()
    try:
        yield
    finally:
        _table = before
        _forget_estimates()


def _forget_estimates() -> None:
    for remembered in (_estimates, norm_estimates, keeps_stack):
        remembered.cache_clear()


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
    if name not in (_MEASURED, "pointwise", *KERNEL_TERMS):
        raise ValueError(f"there is no kernel {name!r}; choose from {(_MEASURED, 'pointwise', *KERNEL_TERMS)}")
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
def _estimates(*key: *Key) -> Mapping[str, float]:
    """Milliseconds by kernel; none if there is nothing to do."""
    counts, names = counts_of(*key), [name for name in applicable(key[2]) if name in KERNEL_TERMS]
    return {name: 0.0 if counts is None else 1e-6 * nanoseconds(name, counts) for name in names}


@lru_cache(maxsize=1024)
def norm_estimates(*key: *Key) -> Mapping[str, float]:
    """Milliseconds for norms: by a stack that is not kept, or without one."""
    counts = counts_of(*key)
    if counts is None:
        return {"stack": 0.0}
    useful = [
        name for name in NORM_TERMS if name != "positions" or counts.d >= FEW_CHANNELS
    ]  # "unfold" is as good then
    ways = {name: 1e-6 * nanoseconds(name, counts) for name in useful}
    stack = min(_estimates(*key).values())
    return {"stack": stack + 1e-6 * (_NORM * counts.weights * counts.width + _CALL), **ways}


def choose_norms(*key: *Key) -> str:
    """How to get norms: "stack", "positions" (products that are not put in order), or Gram "patches" or "pixels".

    `norm_estimates` shows what led to it; inside `use_kernel`, norms are those of the stack that the kernel writes.
    """
    if _preferred in applicable(key[2]):
        return "stack"
    found = norm_estimates(*key)
    return min(found, key=found.__getitem__)


@lru_cache(maxsize=1024)
def keeps_stack(*key: *Key) -> bool:
    """For norms and, after them, a weighted sum: is it faster to keep the gradients than to start again?"""
    counts = counts_of(*key)
    if counts is None:
        return True
    kept = min(_estimates(*key).values()) + 1e-6 * (_KEPT * counts.weights * counts.width + 2 * _CALL)
    return kept < min(norm_estimates(*key).values()) + 1e-6 * nanoseconds("sum", counts)


def counts_of(
    samples: int,
    images: int,
    weight_size: tuple[int, ...],
    x_size: tuple[int, ...],
    dy_size: tuple[int, ...],
    geometry: Geometry,
    dtype: torch.dtype,
) -> Counts | None:
    """What costs are computed from; None if there is nothing to do."""
    if not samples * images * math.prod((*weight_size, *x_size, *dy_size)):
        return None
    in_size, out_size = (dy_size, x_size) if geometry.transposed else (x_size, dy_size)
    return Counts(
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
        table=_table,
    )
