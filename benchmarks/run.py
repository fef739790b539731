"""`make bench` and `make bench-peers`: the cost of each method as a ratio to a plain step, in a table and as JSON.

Every workload and method has a process of its own, one after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import environment
from .methods import AGAINST_PEERS, COMPILED, METHODS, OURS, PARTS
from .processes import run_worker
from .workloads import DEFAULT, MAIN, WORKLOADS

COMPILING = 900  # seconds that a method may take, with a compiler
DISTURBED = 0.1  # cores used by others; threads that wait for each other suffer most
FULL = {"rounds": 100, "budget": 2.5, "fewest": 3, "warm-up": 1}
SHORT = {**FULL, "budget": 1.0}  # for what nobody is compared with
QUICK = {"rounds": 3, "budget": 0.5, "fewest": 2, "warm-up": 0}  # the check before it is the warm-up


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a figure as soon as it is known, and write the JSON at the end."""
    args = _arguments(argv)
    workloads = args.workloads or (MAIN if args.peers else DEFAULT)
    suites = {"peers": AGAINST_PEERS, "parts": PARTS, "compiled": COMPILED}
    methods = args.methods or next((names for suite, names in suites.items() if getattr(args, suite)), OURS)
    torch.set_num_threads(args.threads)
    where = environment.describe()
    print(heading(where), flush=True)
    print(f"{'workload':<12}{'B':>4}" + "".join(f"{name:>22}" for name in methods), flush=True)
    rows = []
    for workload in workloads:
        print(f"{workload:<12}{WORKLOADS[workload].batch:>4}", end="", flush=True)
        for method in methods:
            options = worker_options(_effort(method, args.quick), args)
            row = measured(method, [workload], options, COMPILING if "compiled" in method else 120)[0]
            rows.append(row)
            print(f"{cell(row):>22}", end="", flush=True)
        print()
    print("\n".join(["", *_memory_table(rows, workloads, methods), "", *notes(rows)]))
    write(args.json, report(where, rows))
    return 0


def measured(method: str, workloads: Sequence[str], options: Sequence[str], timeout: float = 120) -> list[Any]:
    """A row per workload, also for those that the worker did not come to."""
    missing = {"method": method, "status": "stopped"}
    try:
        found = {row["workload"]: row for row in run_worker(method, workloads, options, timeout)}
    except RuntimeError as crash:
        found, missing = {}, {"method": method, "status": "crashed", "reason": str(crash).strip().splitlines()[-1]}
    return [found.get(name, {"workload": name, **missing}) for name in workloads]


def _effort(method: str, quick: bool) -> dict[str, float]:
    if quick:
        return QUICK
    return SHORT if METHODS[method].kind in ("plain", "engine") else FULL


def worker_options(effort: dict[str, float], args: argparse.Namespace) -> list[str]:
    if args.rounds is not None:
        effort = {**effort, "rounds": args.rounds}
    options = [part for name, value in effort.items() for part in (f"--{name}", str(value))]
    return [*options, "--threads", str(args.threads), *([] if args.no_memory else ["--memory"])]


def report(where: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that tables and plots are made from."""
    methods, workloads = {row["method"]: 0 for row in rows}, {row["workload"]: 0 for row in rows}
    return {
        "environment": where,
        "methods": {name: {"title": METHODS[name].title, "kind": METHODS[name].kind} for name in methods},
        "workloads": {name: _workload(name) for name in workloads},
        "rows": rows,
    }


def _workload(name: str) -> dict[str, Any]:
    w = WORKLOADS[name]
    return {"title": w.title, "batch": w.batch, "group": w.group, "value": w.value}


def write(path: Path | None, found: dict[str, Any]) -> None:
    """One row per line, so that a change in it is one line of a diff."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {name: part for name, part in found.items() if name != "rows"}
    lines = ",\n".join(json.dumps(row) for row in found["rows"])
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{lines}\n]\n}}\n')
    print(f"written to {path}")


def cell(row: dict[str, Any]) -> str:
    """The median ratio and (best against best), or why there is none; the plain step itself in ms."""
    if row["status"] != "ok":
        return str(row["status"])
    if row["method"] == "plain":
        return f"{row['ms']['median']:.1f} ms"
    built = f" {row['seconds_before']:.0f}s" if "compiled" in row["method"] else ""
    return f"{row['ratio']['median']:.2f} ({row['ratio']['min']:.2f}){built}"


def heading(where: dict[str, Any]) -> str:
    machine = f"torch {where['torch']}, {where['threads']} threads on {where['cores']} cores of {where['cpu']}"
    commit = (where["commit"] or "no commit")[:12] + (" with changes in src" if where["source_changed"] else "")
    meaning = "ratios to a plain step (forward + backward), median over rounds and (best against best)"
    return "\n".join(["", f"{where['date']}  {commit}", machine, meaning, ""])


def _memory_table(rows: Sequence[dict[str, Any]], workloads: Sequence[str], methods: Sequence[str]) -> Iterator[str]:
    """What a step holds at most, activations included, in MB."""
    held = {(row["workload"], row["method"]): row.get("bytes") for row in rows}
    if any(held.values()):
        yield "peak memory of a step in MB, activations included"
        for name in workloads:
            sizes = [held[name, method] for method in methods]
            yield f"{name:<16}" + "".join(f"{sum(s.values()) / 1e6:16.0f}" if s else f"{'-':>16}" for s in sizes)


def notes(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What a cell cannot hold: reasons, slow paths, and how far other programs disturbed."""
    told: dict[str, list[str]] = {}
    for row in rows:
        said = [f"{row['status']}, {row['reason']}"] if "reason" in row else []
        for text in [*said, *(f"slow path, {path}" for path in row.get("slow_paths", ()))]:
            told.setdefault(f"{row['method']}: {text}", []).append(row["workload"])
    yield from (f"{text} ({', '.join(where)})" for text, where in told.items())
    busy = [row["others"] for row in rows if row.get("others", 0) > DISTURBED]
    if busy:
        yield f"doubtful: in {len(busy)} of {len(rows)} cases other programs kept up to {max(busy)} cores busy"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="other libraries, too, on the main workloads")
    parser.add_argument("--parts", action="store_true", help="what the time of ps.norms is made of")
    parser.add_argument("--compiled", action="store_true", help="compiled steps, and models that are compiled")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, metavar="NAME")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME")
    parser.epilog = f"workloads: {', '.join(WORKLOADS)}; methods: {', '.join(METHODS)}"
    add_common(parser)
    return parser.parse_args(argv)


def add_common(parser: argparse.ArgumentParser) -> None:
    """What all suites understand."""
    parser.add_argument("--rounds", type=_positive, help="timed rounds, at most")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures and the environment here")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--threads", type=_positive, default=2)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
