"""`make bench-scaling`: how time and memory grow with batch, length, width and depth of a small GPT.

A method goes through the sizes of a curve in one process, smallest first, and stops where it takes too long.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from . import environment
from .methods import METHODS
from .run import QUICK, add_common, heading, measured, notes, report, worker_options, write
from .workloads import CURVES, TABLE

COMPARED = ["plain", "grad", "norms", "clipped_sum", "vmap", "expanded", "opacus-hooks", "opacus-ghost"]
EFFORT = {"rounds": 30, "budget": 0.6, "fewest": 3, "warm-up": 1}
LIMITS = {"longest": 4.0, "memory-limit": 16.0}  # seconds of a step, GB


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per curve as soon as it is known, and write the JSON at the end."""
    args = _arguments(argv)
    effort = {**(QUICK if args.quick else EFFORT), **LIMITS}
    torch.set_num_threads(args.threads)
    where = environment.describe()
    print(heading(where), flush=True)
    rows = []
    for size in args.curves:
        points = [w for w in TABLE if w.group == size][: args.points]
        print(f"{size:<14}" + "".join(f"{w.value:>12}" for w in points) + "   ms, times plain", flush=True)
        for method in args.methods:
            found = measured(method, [w.name for w in points], worker_options(effort, args))
            rows += found
            print(f"  {method:<12}" + "".join(f"{_cell(row):>12}" for row in found), flush=True)
    print("\n".join(["", *notes(rows)]))
    write(args.json, report(where, rows))
    return 0


def _cell(row: dict[str, object]) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    return f"{row['ms']['min']:.1f} {row['ratio']['min']:.2f}"  # type: ignore[index]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES), metavar="NAME")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=COMPARED, metavar="NAME")
    parser.add_argument("--points", type=int, help="of each curve, the smallest ones")
    add_common(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
