"""`make bench`: what per-sample gradients cost, as ratios to a plain step, in a table and as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from . import environment, memory
from .measure import Effort, measure
from .methods import METHODS
from .workloads import DEFAULT, WORKLOADS

FULL = Effort(rounds=100, budget=8.0)
QUICK = Effort(rounds=5, budget=1.5, fewest=2, warm_up=0)  # the check before it is the warm-up
DISTURBED = 0.1  # cores used by others; threads that wait for each other suffer most

COLUMNS = (
    ("workload", 10),
    ("B", 4),
    ("plain ms", 9),
    ("walk+layouts", 15),
    ("capture", 12),
    ("norms", 12),
    ("clipped_sum", 12),
    ("grad(out=)", 12),
    ("grad", 14),
    ("MB: activations + plain/norms/clipped_sum/grad", 46),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a row as soon as it is known, and write the JSON at the end."""
    args = _arguments(argv)
    effort = QUICK if args.quick else FULL
    if args.rounds is not None:
        effort = replace(effort, rounds=args.rounds)
    with_memory = not (args.quick or args.no_memory)
    torch.set_num_threads(args.threads)
    where = environment.describe()
    print(_heading(where), flush=True)
    results = []
    for name in args.workloads:
        result = measure(WORKLOADS[name], effort).as_json()
        result["extra_bytes"] = memory.peaks(name, args.threads) if with_memory else None
        results.append(result)
        print(_row(result), flush=True)
    print(_notes(results))
    if args.json is not None:
        report = {"environment": where, "effort": asdict(effort), "methods": _titles(), "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=DEFAULT, metavar="NAME")
    parser.add_argument("--rounds", type=_positive, help=f"timed rounds per workload, at most (default {FULL.rounds})")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures and the environment here")
    parser.add_argument("--quick", action="store_true", help="few rounds and no memory: less than half a minute")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--threads", type=_positive, default=2)
    parser.epilog = "workloads: " + ", ".join(WORKLOADS)
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _titles() -> dict[str, str]:
    return {method.name: method.title for method in METHODS.values()}


def _heading(where: dict[str, Any]) -> str:
    machine = f"torch {where['torch']}, {where['threads']} threads on {where['cores']} cores of {where['cpu']}"
    commit = (where["commit"] or "no commit")[:12] + (" with changes in src" if where["source_changed"] else "")
    meaning = "ratios to a plain step (forward + backward), median over rounds and (best against best)"
    return "\n".join(["", f"{where['date']}  {commit}", machine, meaning, "", _line([name for name, _ in COLUMNS])])


def _row(result: dict[str, Any]) -> str:
    methods = result["methods"]
    walk = methods["walk"]["ratio"]
    return _line(
        [
            result["workload"],
            str(result["batch"]),
            f"{methods['plain']['ms']['median']:.1f}",
            f"{walk['median']:.1%} ({walk['min']:.1%})",
            *[_ratio(methods[name]["ratio"]) for name in ("capture", "norms", "clipped_sum", "grad_out", "grad")],
            _memory(result["extra_bytes"]),
        ]
    )


def _memory(extra: dict[str, int] | None) -> str:
    """What the forward pass keeps, and how far each method rises above that."""
    if not extra:
        return "-"
    above = " / ".join(f"{extra[name] / 1e6:.0f}" for name in memory.MEASURED)
    return f"{extra['activations'] / 1e6:.0f} + {above}"


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['min']:.2f})"


def _line(cells: Sequence[str]) -> str:
    """Cells under their headings: the first to the left, numbers to the right."""
    padded = [f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True)]
    return "  ".join([f"{cells[0]:<{COLUMNS[0][1]}}", *padded[1:]])


def _notes(results: Sequence[dict[str, Any]]) -> str:
    """What a row cannot hold: the workloads in full, and where a slow path was taken."""
    lines = [""]
    for r in results:
        graph = f"{r['graph_nodes']} graph nodes, {r['probed_nodes']} probed"
        size = f"{r['parameters'] / 1e6:.2f}M parameters"
        lines.append(f"{r['workload']:<10}  {r['title']}: {size}, {graph}, {r['rounds']} rounds")
        if (r["others"] or 0) > DISTURBED:
            lines.append(f"{'':<10}  doubtful: other programs kept {r['others']:.1f} cores busy meanwhile")
        lines += [f"{'':<10}  slow path: {text}" for text in r["warnings"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
