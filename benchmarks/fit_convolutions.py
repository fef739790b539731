"""Fit the costs of the convolution kernels to this machine, and print the table for `kernels/conv_costs.py`.

    python -m benchmarks.fit_convolutions [--shapes N] [--threads N] [--seed N]

Shapes are drawn at random, from what networks use. Each kernel's counts are fitted to its times by non-negative least
squares of relative errors. How good the choices are then is for `benchmarks.convolutions` to say, on shapes of its own.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf, prod

import numpy as np
import torch
from scipy.optimize import nnls

from persample.kernels.conv_costs import TERMS
from persample.kernels.conv_select import counts_of
from persample.kernels.convolution import weight_summed

from .convolutions import CLOCKS, GRID, Contenders, Shape, kernels, measure, norms

_MOST_PRODUCTS, _MOST_PATCHES = 1.5e9, 3e7  # in a shape: what takes much longer is no different
Sample = tuple[Mapping[str, float], float]  # counts, and nanoseconds


def draw(chance: random.Random) -> Shape:
    """A convolution of any kind, but of those that are common more often."""
    n = chance.choice([1, 2, 2, 2, 2, 3])
    groups = chance.choice([1, 1, 1, 1, 2, 4, 8, 16, 32, 64])
    d = 1 if groups > 16 else chance.choice([1, 3, 4, 6, 8, 16, 24, 32, 64, 128, 256] if groups == 1 else [2, 4, 8, 16])
    p = chance.choice([d, d, 2 * d, 4 * d]) if d > 3 or groups > 1 else chance.choice([6, 16, 32, 64])
    kernel = chance.choice([2, 3, 3, 3, 3, 4, 5, 7] if n < 3 else [2, 3, 3])
    side = chance.choice({1: [50, 100, 256, 500], 2: [4, 7, 8, 12, 16, 24, 28, 32, 56], 3: [6, 8, 12, 16]}[n])
    return Shape(
        B=chance.choice([1, 4, 8, 16, 32, 64, 128, 256]),
        cin=groups * d,
        cout=groups * p,
        size=(side,) * n,
        kernel=(kernel,) * n,
        stride=chance.choice([1, 1, 1, 2, 2, 3]),
        padding=chance.choice([0, kernel // 2]),
        dilation=chance.choice([1, 1, 1, 1, 1, 2]),
        groups=groups,
        transposed=chance.random() < 0.1,
        R=chance.choice([1, 1, 1, 1, 1, 4]),
        dtype=chance.choice([torch.float32] * 7 + [torch.float64]),
    )


def is_useful(shape: Shape) -> bool:
    """Neither impossible nor too large, and not one of those that choices are judged by."""
    reach = shape.dilation * (shape.kernel[0] - 1) + 1
    if shape in GRID or reach > shape.size[0] + 2 * shape.padding:
        return False
    places = shape.B * shape.R * prod(shape.size if shape.transposed else shape.out_size)
    patches = places * (shape.cout if shape.transposed else shape.cin) * prod(shape.kernel)
    return 0 < patches < _MOST_PATCHES and places * prod(shape.weight_size) < _MOST_PRODUCTS


def measured(count: int, seed: int, clock: str) -> dict[str, list[Sample]]:
    """Counts and times of ``count`` shapes, by the ways that kernels take."""
    chance, found = random.Random(seed), defaultdict[str, list[Sample]](list)
    for done in range(count):
        shape = draw(chance)
        while not is_useful(shape):
            shape = draw(chance)
        counts = counts_of(*shape.key)
        assert counts is not None
        for contenders in (kernels(shape), norms(shape), summed(shape)):
            for what, seconds in measure(shape, contenders, CLOCKS[clock], rounds=12, budget=0.25).items():
                if what in TERMS:  # but for "stack", which is one of the kernels
                    way, terms = TERMS[what](counts)
                    found[way].append((terms, 1e9 * seconds))
        if sys.stderr.isatty():
            print(f"\r{done + 1} of {count} shapes", end="", file=sys.stderr, flush=True)
    return found


def summed(shape: Shape) -> Contenders:
    """The sum of all samples' gradients."""
    return {"sum": partial(weight_summed, *shape.tensors(), shape.weight_size, shape.geometry)}


def fit(samples: Sequence[Sample]) -> dict[str, float]:
    """Nanoseconds for each count: relative errors are least, and those that are too large to be typical weigh less."""
    names = list(samples[0][0])
    counts = np.array([[terms[name] for name in names] for terms, _ in samples])
    rows = counts / np.array([[time] for _, time in samples])
    weights, found = np.ones(len(rows)), np.zeros(len(names))
    for _ in range(5):
        found = nnls(rows * weights[:, None], weights)[0]
        off = np.abs(rows @ found - 1)
        weights = 1 / np.sqrt(np.maximum(off, 0.1))
    return {name: float(f"{value:.2g}") for name, value in zip(names, found, strict=True)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, fit and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_convolutions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shapes", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    found = measured(args.shapes, args.seed, "thread" if args.threads == 1 else "wall")
    print(
        f"# {torch.backends.cpu.get_cpu_capability()}, {args.threads} threads, {args.shapes} shapes, seed {args.seed}"
    )
    for way, samples in found.items():
        each = fit(samples)
        errors = [abs(sum(each[name] * n for name, n in terms.items()) / time - 1) for terms, time in samples]
        middle = sorted(errors)[len(errors) // 2] if errors else inf
        print(f"    {way!r}: {each},  # {len(samples)} shapes, half within {middle:.0%}".replace("'", '"'))
    return 0


if __name__ == "__main__":
    sys.exit(main())
