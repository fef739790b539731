"""`make bench-influence`: all figures of docs/influence-benchmarks.md. Parts that are left out stay as they were."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import environment
from ..tables import filled
from . import accuracy, costs, growth, report, runs
from .tasks import TASKS


def costs_first(names: Sequence[str]) -> dict[str, Any]:
    """Forked, hence before anything else has used torch's threads."""
    return {"rows": [costs.of_workload(name) for name in names]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.influence", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=["costs", "lds", "replay", "growth"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--workloads", nargs="+", default=list(costs.COSTLY))
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--page", type=Path, help="put the tables between this page's markers")
    parser.add_argument("--images", type=Path, help="a folder for plots")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "costs": lambda: costs_first(args.workloads),
        "lds": lambda: {"rows": accuracy.all_measured(args.tasks), "versions": accuracy.versions()},
        "replay": lambda: {"rows": runs.replayed()},
        "growth": growth.measured,
    }
    for name, measure in parts.items():
        if args.only is None or name in args.only:
            others = environment.Others()
            where = environment.describe()
            found[name] = {"environment": where, **measure(), "others": round(others.cores() or 0.0, 2)}
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.page:
        args.page.write_text(filled(args.page.read_text(), report.tables(found)))
    if args.images:
        report.plot(found, args.images)
    return 0


if __name__ == "__main__":
    sys.exit(main())
