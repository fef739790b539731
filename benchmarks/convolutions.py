"""How good the choice among the convolution kernels is: every kernel is timed on a grid of shapes.

    python -m benchmarks.convolutions [--norms] [--quick] [--threads N] [--clock wall|thread] [--json PATH]
    python -m benchmarks.convolutions --gains

A row shows the fastest kernel, the one that is chosen, and how much longer that one needs. With ``--norms``, it is the
ways to norms that are compared. ``--gains`` measures nothing: it shows what each kernel and each way to norms is worth
by the model that choices are made by, on both kinds of CPU.
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
from persample.kernels.convolution import applicable, estimates, explain_choice, use_costs, weight_per_sample
from persample.kernels.convolution.costs import KERNEL_COSTS, NORM_COSTS, RATES

from . import environment
from .convolution_shapes import GRID, Shape, draw, is_useful

HOPELESS = 8  # an estimate of so many times the best one is not worth a try
NEAR = 1.15  # a choice is right if it takes at most so many times the best kernel's time
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "thread": time.thread_time}


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
    estimated = estimates(shape.sizes, "norms")
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
    choice = explain_choice(shape.sizes, "norms" if of_norms else "gradients")
    return Row(shape, seconds, choice.way, choice.milliseconds)


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


@dataclass(frozen=True)
class Gain:
    """How many times as long the best choice takes, by the model, without one way: on average, and where it is most."""

    mean: float
    most: float
    shape: Shape

    def __str__(self) -> str:
        return f"{self.mean:.3f} on average, at most {self.most:.2f} ({self.shape.title})"


def gains(shapes: Sequence[Shape], cpu: str) -> dict[tuple[str, str], Gain]:
    """By goal and way: what every kernel gains for gradients and for norms, and every way to norms that needs none."""
    pairs = [("gradients", kernel) for kernel in KERNEL_COSTS]
    pairs += [("norms", way) for way in (*KERNEL_COSTS, *NORM_COSTS)]
    table: dict[tuple[str, str], Gain] = {}
    with use_costs(cpu):
        for goal, way in pairs:
            ratios = [_best_milliseconds(s, goal, without=way) / _best_milliseconds(s, goal) for s in shapes]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            most = max(range(len(shapes)), key=ratios.__getitem__)
            table[goal, way] = Gain(mean, ratios[most], shapes[most])
    return table


def _best_milliseconds(shape: Shape, goal: str, without: str | None = None) -> float:
    """The least estimate for gradients or norms, where one kernel or one way to norms is not there."""
    kernels = estimates(shape.sizes)
    best_kernel = min(time for kernel, time in kernels.items() if kernel != without)
    if goal == "gradients":
        return best_kernel
    ways = {**estimates(shape.sizes, "norms")}
    ways["stack"] += best_kernel - min(kernels.values())
    return min(time for way, time in ways.items() if way != without)


def show_gains() -> None:
    """Print what every way gains on both kinds of CPU, on the grid and on random shapes."""
    chance = random.Random(0)
    drawn = [shape for shape in (draw(chance) for _ in range(1200)) if is_useful(shape)]
    for cpu in RATES:
        for name, shapes in (("the grid", GRID), (f"{len(drawn)} random shapes", drawn)):
            print(f"{cpu}, {name}: times as long without")
            for (goal, way), gain in gains(shapes, cpu).items():
                print(f"  {goal:<9} {way:<9} {gain}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a row as soon as it is known, and write the JSON at the end."""
    args = _arguments(argv)
    if args.gains:
        show_gains()
        return 0
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
    return list(Convolution.NORMS if of_norms else KERNEL_COSTS)


def _line(row: Row, of_norms: bool) -> str:
    times = [f"{1e3 * row.seconds[name]:.2f}" if name in row.seconds else "-" for name in _columns(of_norms)]
    mark = "" if row.ratio <= NEAR else "  <"
    cells = " ".join(f"{time:>9}" for time in times)
    return f"{row.shape.title:<44} {cells}  {row.best:<9} {row.chosen:<9} {row.ratio:.2f}{mark}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convolutions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gains", action="store_true", help="what each way is worth by the model, without measuring")
    parser.add_argument("--norms", action="store_true", help="compare ways to norms instead of kernels")
    parser.add_argument("--quick", action="store_true", help="three rounds: less than a minute")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, help="default: the thread's CPU time for one thread, or else wall")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures and the environment here")
    parser.add_argument("--shapes", type=int, metavar="N", help="only the first N shapes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
