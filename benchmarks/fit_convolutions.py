"""Fit the rates of the convolution ways to this machine: what `kernels/convolution/rates.json` has for a kind of CPU.

    python -m benchmarks.fit_convolutions [--shapes N] [--threads N] [--seed N] [--into PATH]

Shapes are drawn at random, from what networks use. The counts of each variant of a way are fitted to its times by
non-negative least squares of relative errors. The result is printed in the format of that file, or written into such a
file, where variants that no shape took keep the rates they had. How good the choices are then is for
`benchmarks.convolutions` to say, on shapes of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from persample.kernels.convolution import weight_summed
from persample.kernels.convolution.costs import FORMULAS

from .convolution_shapes import Shape, draw, is_useful
from .convolutions import CLOCKS, Contenders, kernels, measure, norms

CPU = torch.backends.cpu.get_cpu_capability()
Sample = tuple[Mapping[str, float], float]  # counts, and nanoseconds
Rates = dict[str, dict[str, float]]  # by variant and by what is counted


def measured(count: int, seed: int, clock: str) -> dict[str, list[Sample]]:
    """Counts and times of ``count`` shapes, by the variants of ways that they take."""
    chance, samples = random.Random(seed), defaultdict[str, list[Sample]](list)
    for done in range(count):
        shape = draw(chance)
        while not is_useful(shape):
            shape = draw(chance)
        for contenders in (kernels(shape), norms(shape), summed(shape)):
            for way, seconds in measure(shape, contenders, CLOCKS[clock], rounds=12, budget=0.25).items():
                if way in FORMULAS:  # but for "stack", which is one of the kernels
                    variant, counts = FORMULAS[way](shape.sizes, CPU)
                    samples[variant].append((counts, 1e9 * seconds))
        if sys.stderr.isatty():
            print(f"\r{done + 1} of {count} shapes", end="", file=sys.stderr, flush=True)
    return samples


def summed(shape: Shape) -> Contenders:
    """The sum of all samples' gradients."""
    return {"sum": partial(weight_summed, *shape.tensors(), shape.weight_size, shape.geometry)}


def fit(samples: Sequence[Sample]) -> dict[str, float]:
    """Nanoseconds for each count: relative errors are least, and those that are too large to be typical weigh less."""
    names = list(samples[0][0])
    counts = np.array([[each[name] for name in names] for each, _ in samples])
    rows = counts / np.array([[time] for _, time in samples])
    weights, rates = np.ones(len(rows)), np.zeros(len(names))
    for _ in range(5):
        rates = nnls(rows * weights[:, None], weights)[0]
        off = np.abs(rows @ rates - 1)
        weights = 1 / np.sqrt(np.maximum(off, 0.1))
    return {name: float(f"{value:.2g}") for name, value in zip(names, rates, strict=True)}


def typical_error(samples: Sequence[Sample], rates: Mapping[str, float]) -> float:
    """The relative error that half of the estimates stay within."""
    errors = [abs(sum(rates[name] * n for name, n in counts.items()) / time - 1) for counts, time in samples]
    return sorted(errors)[len(errors) // 2]


def merged(file: Mapping[str, Any], about: str, rates: Rates) -> dict[str, Any]:
    """The file's contents with these rates for this kind of CPU, in place of those that it had."""
    before = file.get(CPU, {}).get("nanoseconds", {})
    return {**file, CPU: {"about": about, "nanoseconds": {**before, **rates}}}


def as_text(file: Mapping[str, Any]) -> str:
    """As JSON, one line for each variant."""
    tables = []
    for cpu, table in file.items():
        rows = ",\n".join(f"   {json.dumps(variant)}: {json.dumps(r)}" for variant, r in table["nanoseconds"].items())
        about = f'  "about": {json.dumps(table["about"])}'
        tables.append(f' {json.dumps(cpu)}: {{\n{about},\n  "nanoseconds": {{\n{rows}\n  }}\n }}')
    return "{\n" + ",\n".join(tables) + "\n}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, fit, and print or write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_convolutions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shapes", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--into", type=Path, metavar="PATH", help="a file of rates, in which this CPU's are replaced")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    samples = measured(args.shapes, args.seed, "thread" if args.threads == 1 else "wall")
    rates = {variant: fit(each) for variant, each in samples.items()}
    for variant, each in samples.items():
        error = typical_error(each, rates[variant])
        print(f"{variant}: {len(each)} shapes, half within {error:.0%}", file=sys.stderr)
    about = f"{args.threads} threads, {args.shapes} shapes, seed {args.seed}"
    if args.into is None:
        print(as_text(merged({}, about, rates)), end="")
    else:
        args.into.write_text(as_text(merged(json.loads(args.into.read_text()), about, rates)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
