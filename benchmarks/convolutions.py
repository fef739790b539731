"""How good the choice among the convolution kernels is: every kernel is timed on a grid of shapes.

    python -m benchmarks.convolutions [--norms] [--quick] [--threads N] [--clock wall|thread] [--json PATH]

A row shows the fastest kernel, the one that is chosen, and how much longer that one needs. With ``--norms``, it is the
ways to norms that are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from persample.factors import Convolution, Workspace
from persample.kernels.conv_costs import KERNEL_TERMS
from persample.kernels.conv_select import Key, applicable, norm_estimates
from persample.kernels.convolution import Geometry, choose_norms, explain_choice, weight_per_sample

from . import environment

HOPELESS = 8  # an estimate of so many times the best one is not worth a try
NEAR = 1.15  # a choice is right if it takes at most so many times the best kernel's time
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "thread": time.thread_time}


@dataclass(frozen=True)
class Shape:
    """A convolution: B samples of R images (R, Cin, *size), with Cin and Cout over all groups."""

    B: int
    cin: int
    cout: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    R: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def title(self) -> str:
        size, kernel = ("x".join(map(str, t)) for t in (self.size, self.kernel))
        extras = {"s": self.stride, "dil": self.dilation, "G": self.groups, "R": self.R}
        words = [f"{name}{value}" for name, value in extras.items() if value != 1]
        words += ["transposed"] * self.transposed + ["float64"] * (self.dtype == torch.float64)
        return " ".join([f"B{self.B} {self.cin}>{self.cout} {size} k{kernel}", *words])

    @property
    def weight_size(self) -> tuple[int, ...]:
        first, second = (self.cin, self.cout) if self.transposed else (self.cout, self.cin)
        return (first, second // self.groups, *self.kernel)

    @property
    def geometry(self) -> Geometry:
        n = len(self.size)
        each = ((value,) * n for value in (self.stride, self.padding, self.dilation))
        return Geometry(*each, transposed=self.transposed, output_padding=(0,) * n, groups=self.groups)

    @property
    def key(self) -> Key:
        """What the choice goes by."""
        return self.B, self.R, self.weight_size, self.size, self.out_size, self.geometry, self.dtype

    @property
    def out_size(self) -> tuple[int, ...]:
        """Of the output, in space."""
        x = torch.empty(1, self.cin, *self.size, device="meta")
        weight = torch.empty(self.weight_size, device="meta")
        return tuple(torch.convolution(x, weight, None, *self.geometry.arguments).shape[2:])

    def tensors(self) -> tuple[Tensor, Tensor]:
        """x and dy."""
        x = torch.randn(self.B, self.R, self.cin, *self.size, dtype=self.dtype)
        return x, torch.randn(self.B, self.R, self.cout, *self.out_size, dtype=self.dtype)


def square(B: int, cin: int, cout: int, side: int, k: int, **options: Any) -> Shape:
    """In two dims, padded so that a stride of 1 keeps the size."""
    options.setdefault("padding", options.get("dilation", 1) * (k - 1) // 2)
    return Shape(B, cin, cout, (side, side), (k, k), **options)


def depthwise(B: int, channels: int, side: int, k: int, **options: Any) -> Shape:
    return square(B, channels, channels, side, k, groups=channels, **options)


def line(B: int, cin: int, cout: int, length: int, k: int, **options: Any) -> Shape:
    return Shape(B, cin, cout, (length,), (k,), **options)


def cube(B: int, cin: int, cout: int, side: int, k: int, **options: Any) -> Shape:
    return Shape(B, cin, cout, (side,) * 3, (k,) * 3, padding=k // 2, **options)


GRID = [
    # residual networks on small images
    *[square(32, c, c, side, 3) for c, side in ((32, 32), (64, 16), (128, 8), (256, 4))],
    *[square(32, c, 2 * c, side, 3, stride=2) for c, side in ((32, 32), (64, 16), (128, 8))],
    *[square(B, 64, 64, 16, 3) for B in (1, 4, 128)],
    square(256, 16, 16, 32, 3),
    square(8, 64, 64, 56, 3),
    square(8, 128, 128, 28, 3),
    square(8, 256, 256, 14, 3),
    square(4, 512, 512, 7, 3),
    square(16, 48, 96, 20, 3),
    square(16, 33, 65, 15, 3),
    # first layers
    square(32, 3, 32, 32, 3),
    square(64, 3, 64, 32, 3),
    square(16, 3, 64, 64, 7, stride=2),
    square(256, 1, 16, 28, 8, stride=2),
    square(256, 1, 32, 28, 3, padding=0),
    square(128, 1, 6, 28, 5),
    square(16, 3, 128, 64, 8, stride=8, padding=0),
    square(8, 3, 192, 96, 16, stride=16, padding=0),
    square(16, 3, 32, 96, 3, stride=2),
    # second layers of small networks
    square(256, 16, 32, 12, 4, stride=2, padding=0),
    square(256, 32, 64, 26, 3, padding=0),
    square(128, 6, 16, 14, 5, padding=0),
    square(64, 8, 16, 14, 5),
    # other kernels, strides and dilations
    square(16, 64, 64, 16, 5),
    square(16, 32, 32, 24, 7),
    square(16, 32, 64, 33, 3, stride=3),
    square(16, 64, 64, 24, 5, stride=2),
    square(16, 32, 32, 32, 3, dilation=2),
    square(8, 64, 64, 32, 3, dilation=4),
    Shape(16, 64, 64, (16, 16), (1, 7), padding=0),
    Shape(16, 64, 64, (16, 16), (7, 1), padding=0),
    # few groups
    *[square(32, 64, 64, 16, 3, groups=groups) for groups in (2, 4, 8, 16, 32)],
    square(8, 128, 128, 28, 3, groups=32),
    square(8, 256, 256, 14, 3, groups=32, stride=2),
    square(32, 48, 48, 16, 3, groups=12),
    # one channel per group
    depthwise(64, 64, 16, 3),
    depthwise(64, 64, 16, 3, stride=2),
    depthwise(64, 64, 16, 5),
    depthwise(16, 96, 28, 5, stride=2),
    depthwise(8, 96, 56, 7),
    depthwise(8, 384, 14, 7),
    depthwise(16, 64, 28, 3, dilation=2),
    depthwise(32, 64, 16, 3, dtype=torch.float64),
    square(32, 32, 64, 16, 3, groups=32),
    # one dim
    line(32, 64, 64, 256, 5, padding=2),
    line(32, 32, 64, 128, 3, padding=1, stride=2),
    line(64, 16, 32, 100, 7),
    line(16, 1, 64, 4000, 80, stride=4),
    line(16, 64, 64, 500, 3, padding=4, dilation=4),
    line(8, 512, 512, 256, 4, padding=3, groups=512),
    line(8, 144, 144, 400, 31, padding=15, groups=144),
    line(16, 256, 256, 50, 3, padding=1),
    # three dims
    cube(8, 16, 32, 12, 3),
    cube(8, 1, 16, 20, 3),
    cube(8, 32, 32, 8, 3),
    cube(8, 16, 32, 16, 3, stride=2),
    cube(4, 32, 32, 12, 3, groups=32),
    # transposed
    square(32, 64, 32, 8, 4, stride=2, padding=1, transposed=True),
    square(32, 128, 64, 4, 4, stride=2, padding=1, transposed=True),
    square(32, 32, 3, 16, 4, stride=2, padding=1, transposed=True),
    square(16, 64, 64, 16, 3, transposed=True),
    line(16, 64, 32, 64, 4, stride=2, padding=1, transposed=True),
    # several images per sample
    square(8, 32, 32, 16, 3, R=4),
    square(4, 64, 64, 8, 3, R=16),
    square(8, 3, 32, 32, 3, R=4),
    line(8, 32, 32, 64, 3, padding=1, R=8),
    depthwise(8, 64, 16, 3, R=4),
    # double precision
    square(16, 32, 32, 16, 3, dtype=torch.float64),
    square(16, 64, 128, 16, 3, stride=2, dtype=torch.float64),
]


@dataclass(frozen=True)
class Row:
    """One shape's times in seconds by kernel, and the kernel that was chosen."""

    shape: Shape
    seconds: Mapping[str, float]
    chosen: str
    estimated: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def ratio(self) -> float:
        return self.seconds[self.chosen] / self.seconds[self.best]

    def as_json(self) -> dict[str, Any]:
        return {
            "shape": self.shape.title,
            "ms": {name: 1e3 * t for name, t in self.seconds.items()},
            "estimated_ms": dict(self.estimated),
            "best": self.best,
            "chosen": self.chosen,
            "ratio": self.ratio,
        }


Contenders = Mapping[str, Callable[[], Tensor]]  # all give the same


def kernels(shape: Shape) -> Contenders:
    """Every sample's gradient, by each kernel."""
    x, dy = shape.tensors()
    out = torch.empty(shape.B, *shape.weight_size, dtype=shape.dtype)
    run = partial(weight_per_sample, x, dy, shape.weight_size, shape.geometry, out=out)
    return {name: partial(run, kernel=name) for name in applicable(shape.weight_size) if name != "pointwise"}


def norms(shape: Shape) -> Contenders:
    """Every sample's norm, in each way that is not out of the question."""
    factor = Convolution(*shape.tensors(), shape.weight_size, shape.geometry)
    estimated = norm_estimates(*shape.key)
    most = HOPELESS * min(estimated.values())
    return {
        name: partial(way, factor, Workspace())
        for name, way in factor.NORMS.items()
        if estimated.get(name, most) <= most
    }


def measure(
    shape: Shape, contenders: Contenders, clock: Callable[[], float], rounds: int, budget: float
) -> dict[str, float]:
    """They take turns, each in ``rounds`` rounds or until ``budget`` seconds are over; the best time counts."""
    names = list(contenders)
    _assert_equal(shape, {name: contenders[name]().clone() for name in names})  # the warm-up, too
    seconds, end = dict.fromkeys(names, math.inf), time.perf_counter() + budget
    shuffle = random.Random(0).shuffle  # nobody always runs after the one that leaves the caches cold
    for done in range(rounds):
        if done and time.perf_counter() > end:
            break
        shuffle(names)
        for name in names:
            start = clock()
            contenders[name]()
            seconds[name] = min(seconds[name], clock() - start)
    return seconds


def judge(shape: Shape, of_norms: bool, clock: Callable[[], float], rounds: int, budget: float) -> Row:
    """Times, and the choice."""
    seconds = measure(shape, norms(shape) if of_norms else kernels(shape), clock, rounds, budget)
    if of_norms:
        return Row(shape, seconds, choose_norms(*shape.key), norm_estimates(*shape.key))
    choice = explain_choice(*shape.key)
    return Row(shape, seconds, choice.kernel, choice.milliseconds)


def _assert_equal(shape: Shape, results: Mapping[str, Tensor]) -> None:
    """Wrong answers are not worth timing."""
    (first, wanted), *others = results.items()
    for name, found in others:
        error = float((found - wanted).norm() / wanted.norm())
        if not error < 1e-4:
            raise ArithmeticError(f"{first} and {name} differ on {shape.title}: relative error {error:.1e}")


def summary(rows: Sequence[Row]) -> str:
    """How many choices were right, and the worst."""
    worst = max(rows, key=lambda row: row.ratio)
    near = sum(row.ratio <= NEAR for row in rows)
    mean = math.exp(sum(math.log(row.ratio) for row in rows) / len(rows))
    return (
        f"{near} of {len(rows)} choices within {NEAR - 1:.0%} of the best kernel ({near / len(rows):.0%}), "
        f"geometric mean {mean:.3f}, worst {worst.ratio:.2f} ({worst.shape.title})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a row as soon as it is known, and write the JSON at the end."""
    args = _arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    clock = CLOCKS[args.clock or ("thread" if args.threads == 1 else "wall")]
    rounds, budget = (3, 0.1) if args.quick else (40, 1.0)
    rows: list[Row] = []
    titles = " ".join(f"{name:>9}" for name in _columns(args.norms))
    print(f"{'shape':<44} {titles}  {'best':<9} {'chosen':<9} ratio", flush=True)
    for shape in GRID[: args.shapes]:
        rows.append(judge(shape, args.norms, clock, rounds, budget))
        print(_line(rows[-1], args.norms), flush=True)
    print(summary(rows))
    if args.json is not None:
        report = {"environment": environment.describe(), "rows": [row.as_json() for row in rows]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _columns(of_norms: bool) -> list[str]:
    return list(Convolution.NORMS if of_norms else KERNEL_TERMS)


def _line(row: Row, of_norms: bool) -> str:
    times = [f"{1e3 * row.seconds[name]:.2f}" if name in row.seconds else "-" for name in _columns(of_norms)]
    mark = "" if row.ratio <= NEAR else "  <"
    cells = " ".join(f"{time:>9}" for time in times)
    return f"{row.shape.title:<44} {cells}  {row.best:<9} {row.chosen:<9} {row.ratio:.2f}{mark}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convolutions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--norms", action="store_true", help="compare ways to norms instead of kernels")
    parser.add_argument("--quick", action="store_true", help="three rounds: less than a minute")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, help="default: the thread's CPU time for one thread, or else wall")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures and the environment here")
    parser.add_argument("--shapes", type=int, metavar="N", help="only the first N shapes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
