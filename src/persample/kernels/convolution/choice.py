"""Which way to take to per-sample gradients of a convolution, or to their norms: the one that costs least by `costs`.

``python -m benchmarks.convolutions`` measures how good the choices are, on 80 shapes that had no part in the fit, but
for one correction by hand; with ``--gains``, it shows what each way is worth by the model: docs/benchmarks.md has both.
`explain_choice` shows the estimates and which CPU's rates they are made of; `use_kernel` overrides the choice, and
`use_costs` makes it the one of another CPU.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from .costs import KERNEL_COSTS, NORM_COSTS, RATES, milliseconds, rates_for
from .patches import FEW_CHANNELS
from .sizes import Sizes

__all__ = [
    "Choice",
    "Goal",
    "applicable",
    "choose",
    "estimates",
    "explain_choice",
    "is_measuring",
    "keeps_stack",
    "measure",
    "use_costs",
    "use_kernel",
]

Goal = Literal["gradients", "norms"]

_MEASURED = "measured"
# Milliseconds for an element of gradients whose norms are taken while they are in cache, for one that is kept until
# gradients are weighted and summed, and for a call. They are small beside the rest, and taken for those of every CPU.
_NORM, _KEPT, _CALL = 0.14e-6, 0.6e-6, 3.5e-2

_MANY_GROUPS = 32

_own_cpu = torch.backends.cpu.get_cpu_capability()
_cpu = rates_for(_own_cpu)  # whose rates estimates are made of: see `use_costs`
_preferred: str | None = None  # see `use_kernel`
_fastest: dict[Sizes, str] = {}  # kernels that were measured


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel or a way to norms, the time that each one was estimated to take, and by whose rates."""

    way: str
    milliseconds: Mapping[str, float]
    costs: str


def applicable(weight_size: Sequence[int]) -> tuple[str, ...]:
    """The kernels that can compute these gradients."""
    special = {"forward": weight_size[1] == 1, "pointwise": math.prod(weight_size[2:]) == 1}
    return ("library", "unfold", *[name for name, can in special.items() if can])


def choose(sizes: Sizes, goal: Goal = "gradients") -> str:
    """The kernel that `weight_per_sample` runs, or the way to norms.

    Norms are those of the gradients that a kernel writes, a few samples at a time ("stack"), or that products leave in
    another order ("positions"), or come from Gram matrices of "patches" or "pixels". Inside `use_kernel`, they are
    those of what that kernel writes.
    """
    return explain_choice(sizes, goal).way


def explain_choice(sizes: Sizes, goal: Goal = "gradients") -> Choice:
    """What `choose` says, and the estimates that led to it.

    >>> from persample.kernels.geometry import Geometry
    >>> geometry = Geometry((1, 1), (1, 1), (1, 1), transposed=False, output_padding=(0, 0), groups=1)
    >>> with use_costs("AVX512"):
    ...     choice = explain_choice(Sizes(32, 1, (256, 256, 3, 3), (4, 4), (4, 4), geometry))
    >>> choice.way, sorted(choice.milliseconds), choice.costs
    ('unfold', ['library', 'unfold'], 'AVX512...')
    """
    by_way = estimates(sizes, goal)
    way = _overriding(sizes, goal) or min(by_way, key=by_way.__getitem__)
    return Choice(way, by_way, "accelerator" if sizes.on_accelerator else _whose_costs())


def _overriding(sizes: Sizes, goal: Goal) -> str | None:
    """The way that is taken whatever the estimates are, if there is one."""
    kernels = applicable(sizes.weight)
    if goal == "norms":  # on an accelerator, writing gradients out costs no more than a plain backward
        return "stack" if _preferred in kernels or sizes.on_accelerator else None
    if is_measuring() and sizes in _fastest:
        return _fastest[sizes]
    if _preferred in kernels:
        return _preferred
    if sizes.on_accelerator and "pointwise" not in kernels:
        return _on_accelerator(sizes)
    return "pointwise" if "pointwise" in kernels else None  # what "unfold" does, without its copy


def _on_accelerator(sizes: Sizes) -> str:
    """The kernel for some accelerator, whose rates are unknown.

    Samples as groups of one convolution are a single launch, and what there are kernels for if groups have one channel.
    Otherwise libraries do many groups badly: PyTorch's own ExpandedWeights unfold from so many samples on.
    """
    return "library" if sizes.is_depthwise or sizes.matrices < _MANY_GROUPS else "unfold"


def estimates(sizes: Sizes, goal: Goal = "gradients") -> Mapping[str, float]:
    """Milliseconds by kernel, or by way to norms; "pointwise" is not among them, as it is taken wherever it can be."""
    return _estimates(sizes, goal, _cpu)


@lru_cache(maxsize=4096)
def _estimates(sizes: Sizes, goal: Goal, cpu: str) -> Mapping[str, float]:
    if goal == "gradients":
        return {way: milliseconds(way, sizes, cpu) for way in applicable(sizes.weight) if way in KERNEL_COSTS}
    if sizes.is_empty:
        return {"stack": 0.0}
    stack = _fastest_kernel(sizes, cpu) + _NORM * sizes.weights * sizes.width + _CALL
    ways = [way for way in NORM_COSTS if way != "positions" or sizes.d >= FEW_CHANNELS]
    return {"stack": stack, **{way: milliseconds(way, sizes, cpu) for way in ways}}


def _fastest_kernel(sizes: Sizes, cpu: str) -> float:
    return min(_estimates(sizes, "gradients", cpu).values())


def keeps_stack(sizes: Sizes) -> bool:
    """For norms and, after them, a weighted sum: is it faster to keep the gradients than to start again?"""
    return sizes.on_accelerator or _keeps_stack(sizes, _cpu)


@lru_cache(maxsize=1024)
def _keeps_stack(sizes: Sizes, cpu: str) -> bool:
    if sizes.is_empty:
        return True
    kept = _fastest_kernel(sizes, cpu) + _KEPT * sizes.weights * sizes.width + 2 * _CALL
    return kept < min(_estimates(sizes, "norms", cpu).values()) + milliseconds("sum", sizes, cpu)


def _whose_costs() -> str:
    """The kind of CPU that rates were fitted to, and whether that is this one."""
    if _cpu == _own_cpu:
        return _cpu
    if _own_cpu in RATES:
        return f"{_cpu}, though this CPU is {_own_cpu}"
    return f"{_cpu}, for want of any fitted to {_own_cpu} (python -m benchmarks.fit_convolutions)"


@contextmanager
def use_costs(cpu: str) -> Iterator[None]:
    """Inside, choose as a CPU of this kind does, in all threads: what is chosen does not depend on the machine.

    >>> from persample.kernels.geometry import Geometry
    >>> geometry = Geometry((1, 1), (2, 2), (2, 2), transposed=False, output_padding=(0, 0), groups=1)
    >>> with use_costs("AVX2"):
    ...     choose(Sizes(64, 1, (16, 16, 3, 3), (32, 32), (32, 32), geometry))
    'unfold'
    """
    global _cpu
    if cpu not in RATES:
        raise ValueError(f"no costs were fitted to {cpu!r}; choose from {tuple(RATES)}")
    before, _cpu = _cpu, cpu
    try:
        yield
    finally:
        _cpu = before


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Inside, run this kernel for every convolution that it can do, in all threads.

    "measured" times all kernels at the first convolution of each shape, and runs the fastest from then on. Results may
    then differ in their last digits from run to run.

    >>> from persample.kernels.geometry import Geometry
    >>> geometry = Geometry((1, 1), (1, 1), (1, 1), transposed=False, output_padding=(0, 0), groups=1)
    >>> with use_kernel("library"):
    ...     choose(Sizes(32, 1, (256, 256, 3, 3), (4, 4), (4, 4), geometry))
    'library'
    """
    global _preferred
    names = (_MEASURED, "pointwise", *KERNEL_COSTS)
    if name not in names:
        raise ValueError(f"there is no kernel {name!r}; choose from {names}")
    before, _preferred = _preferred, name
    try:
        yield
    finally:
        _preferred = before


def is_measuring() -> bool:
    """Are kernels to be timed?"""
    return _preferred == _MEASURED


def measure(sizes: Sizes, run: Callable[[str], object]) -> str:
    """The fastest kernel for convolutions of these sizes; ``run`` calls the kernel that it is given the name of."""
    if sizes not in _fastest:
        names = applicable(sizes.weight)
        _fastest[sizes] = min(names, key=lambda name: min(_seconds(run, name) for _ in range(3)))
    return _fastest[sizes]


def _seconds(run: Callable[[str], object], name: str) -> float:
    start = time.perf_counter()
    run(name)
    return time.perf_counter() - start
