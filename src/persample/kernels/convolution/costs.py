"""What each way to per-sample gradients of convolutions costs, and each way to their norms, and their sum.

A time is a sum of counts times nanoseconds. What there is to count follows from the code, and is written here, one
formula for each way. The nanoseconds are fitted to measurements (``python -m benchmarks.fit_convolutions``), one table
for each kind of CPU: ``rates.json``. A way may run different code for different convolutions; each such variant has
rates of its own. Only the order of the times matters.
"""

import json
import math
from collections.abc import Callable, Mapping
from importlib.resources import files

import torch

from ..gram import BLOCK
from .patches import CACHE_BYTES, FEW_CHANNELS
from .sizes import Sizes

__all__ = ["FORMULAS", "KERNEL_COSTS", "NORM_COSTS", "RATES", "milliseconds", "rates_for"]

_FRESH_BYTES = 2**24  # a larger allocation may be new pages every time

Rates = Mapping[str, Mapping[str, float]]  # nanoseconds by variant and by what is counted
RATES: Mapping[str, Rates] = {
    cpu: table["nanoseconds"]
    for cpu, table in json.loads(files(__package__).joinpath("rates.json").read_text(encoding="utf-8")).items()
}


def rates_for(cpu: str) -> str:
    """Whose rates to use on a CPU, by PyTorch's names; AVX2's, which expect less of the library, if it has none.

    >>> rates_for("AVX512"), rates_for("AVX2"), rates_for("SVE256")
    ('AVX512', 'AVX2', 'AVX2')
    """
    return cpu if cpu in RATES else "AVX2"


def milliseconds(way: str, sizes: Sizes, cpu: str) -> float:
    """About how long a kernel takes, or a way to norms, or the sum over all samples; 0 if there is nothing to do."""
    if sizes.is_empty:
        return 0.0
    variant, counts = FORMULAS[way](sizes, cpu)
    rates = RATES[cpu][variant]
    return 1e-6 * sum(rates[name] * count for name, count in counts.items())


Counts = tuple[str, dict[str, float]]  # the variant of a way, and how often it does what
Formula = Callable[[Sizes, str], Counts]  # for a kind of CPU: on some, the library has more vectorised code


def _library(s: Sizes, cpu: str) -> Counts:
    """Vectorised, or else an im2col and a GEMM for each image and group; float64 takes a call for each group.

    The result is written twice, in the library's own order and in ours; R > 1 costs transposed copies.
    """
    counts: dict[str, float] = {
        "products": _products(s),
        "weights": s.weights,
        "fresh": s.weights if s.weights * s.dtype.itemsize > _FRESH_BYTES else 0,
        "x and dy": s.inputs + s.cotangents,
        "call": 1,
    }
    if _is_vectorised(s, cpu):
        variant = "depthwise" if s.is_depthwise else "3-d" if len(s.kernel) == 3 else "blocks"
        counts["x and dy of several images"] = s.inputs + s.cotangents if s.R > 1 else 0
        return f"library, {variant}", counts
    counts |= {"patches": s.patches, "runs": s.patches / _run(s)}
    if s.dtype == torch.float32:
        return "library, patches", {**counts, "images": s.matrices * s.R}
    return "library, double", {**counts, "images": s.matrices * (1 + s.R)}


def _is_vectorised(s: Sizes, cpu: str) -> bool:
    """Whether the library has vectorised code for it: for 8 channels at a time, or for small depthwise kernels."""
    undilated = max(s.geometry.dilation) == 1
    if s.dtype != torch.float32 or not (undilated or (cpu == "AVX512" and not s.is_depthwise)):
        return False
    if s.is_depthwise:
        return len(s.kernel) <= 2 and max(s.kernel) <= 3 and max(s.geometry.stride) <= 2
    return s.p % 8 == s.d % 8 == 0 or s.matrices == 1


def _unfold(s: Sizes, cpu: str) -> Counts:
    """Copies patches, run by run, and then runs the best GEMM of all."""
    return "unfold", {
        "patches": s.width * s.patches,
        "runs": s.patches / _run(s),
        "fresh patches": s.patches if s.patches // s.B * s.dtype.itemsize > _FRESH_BYTES else 0,
        "strided patches": s.patches if s.geometry.stride[-1] > 1 else 0,
        "products": _products(s),
        "dy": s.width * s.cotangents,
        "matrices": s.matrices,
        "weights": s.width * s.weights,
        "steps": _steps(s, s.patches),
        "call": 1,
    }


def _forward(s: Sizes, cpu: str) -> Counts:
    """Vectorised for one channel, or for many, if it is not float64; the result is in the right order."""
    variant = "depthwise" if s.p == 1 else "blocks" if s.p % 16 == 0 else "other"
    return f"forward, {variant if s.dtype == torch.float32 else 'double'}", {
        "products": _products(s),
        "x and dy": s.width * (s.inputs + s.cotangents),
        "weights": s.width * s.weights,
        "matrices": s.matrices,
        "call": 1,
    }


def _positions(s: Sizes, cpu: str) -> Counts:
    """Copies patches, channels last, multiplies, and takes norms of the products in the order in which they come."""
    return "positions" + _layout(s), {
        **_patches_by_position(s),
        "products": _products(s),
        "dy": s.width * s.cotangents,
        "matrices": s.matrices,
        "weights": s.width * s.weights,
        "steps": _steps(s, max(s.patches, s.weights)),
        "call": 1,
    }


def _patch_gram(s: Sizes, cpu: str) -> Counts:
    """Copies patches, one row for each position, and multiplies them and dy with themselves."""
    pairs = s.matrices * s.T * (s.T + min(s.T, BLOCK)) / 2
    return "patch gram" + _layout(s), {
        **_patches_by_position(s),
        "products": s.width * pairs * (s.p + s.d * s.K),
        "dy": s.width * s.cotangents,
        "matrices": s.matrices,
        "pairs": s.width * pairs,
        "blocks": -(-s.T // BLOCK) * _steps(s, s.patches),
        "call": 1,
    }


def _layout(s: Sizes) -> str:
    """How patches are laid out in memory, as the end of a variant's name."""
    return ", few channels" if s.d < FEW_CHANNELS else ""


def _patches_by_position(s: Sizes) -> dict[str, float]:
    """What copying patches takes: a run has all channels along the kernel's last axis, unless channels are few."""
    channels_last = s.d >= FEW_CHANNELS
    run = s.d * (s.kernel[-1] if s.geometry.dilation[-1] == 1 else 1) if channels_last else _run(s)
    return {
        "x": s.width * s.inputs,
        "patches": s.width * s.patches,
        "runs": s.patches / run,
        "strided patches": s.patches if s.geometry.stride[-1] > 1 and not channels_last else 0,
    }


def _pixel_gram(s: Sizes, cpu: str) -> Counts:
    """Multiplies pixels and dy with themselves, and adds up the pixels' products along diagonals, axis by axis."""
    pixels = s.R * math.prod(s.geometry.read_size(s.out_size, s.kernel))
    pairs, positions = s.matrices * pixels * (pixels + min(pixels, 2 * BLOCK)) / 2, s.matrices * s.T * s.T
    return "pixel gram", {
        "products": s.width * (pairs * s.d + positions * s.p / 2),
        "pixels": s.width * pairs * sum(s.kernel),
        "pairs": s.width * positions,
        "matrices": s.matrices,
        "call": 1,
    }


def _sum(s: Sizes, cpu: str) -> Counts:
    """The library's gradient of all samples together."""
    variant = "depthwise" if s.is_depthwise else "blocks" if _is_vectorised(s, cpu) else "patches"
    return f"sum, {variant}", {
        "products": _products(s),
        "x and dy": s.width * (s.inputs + s.cotangents),
        "call": 1,
    }


def _products(s: Sizes) -> float:
    """Multiplications, those of float64 counted twice."""
    return s.weights * s.T * s.width


def _run(s: Sizes) -> int:
    """How many elements of patches are copied at a time: the length of the innermost axis that has any."""
    axes = (*s.out_size[::-1], s.R, *s.kernel[::-1])
    return next((n for n in axes if n > 1), 1)


def _steps(s: Sizes, elements: int) -> int:
    """In how many steps the batch is done if it has so many elements of temporaries."""
    samples = CACHE_BYTES * s.B // (elements * s.dtype.itemsize)
    return math.ceil(s.B / max(1, samples))


KERNEL_COSTS: Mapping[str, Formula] = {
    "library": _library,
    "unfold": _unfold,
    "forward": _forward,
}
NORM_COSTS: Mapping[str, Formula] = {"positions": _positions, "patches": _patch_gram, "pixels": _pixel_gram}
FORMULAS: Mapping[str, Formula] = {**KERNEL_COSTS, **NORM_COSTS, "sum": _sum}
