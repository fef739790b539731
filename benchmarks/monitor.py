"""`make bench-monitor`: what `ps.Monitor` adds to a training loop, as a table in docs/monitor.md and as JSON.

A plain step is a forward pass, ``losses.mean().backward()`` and letting go of the gradients; there is no optimizer,
which would only make the rest look smaller. Plain steps and steps that are logged to TensorBoard take turns: two plain
ones, of which the second is timed, a logged one, and the plain one after it, which may pay for caches that the logged
one has filled. What the last two take more than two plain steps, over the time of ten, is the overhead of logging one
step in ten. Every workload has a process of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import persample as ps

from . import environment
from .measure import spread
from .processes import forked
from .run import DISTURBED, write
from .tables import MARKED
from .workloads import MAIN, WORKLOADS, Task

EVERY = 10
WAYS = {"monitor.backward(losses)": "backward", "monitor(losses), then a backward": "beside"}
Backward = Callable[[Tensor], Any]


def plain(losses: Tensor) -> None:
    losses.mean().backward()


def ways(task: Task, folder: str) -> dict[str, Backward]:
    """How a loop may get its gradients in a step that is logged."""
    first = ps.Monitor(task.model, log=f"{folder}/backward", every=1)
    second = ps.Monitor(task.model, log=f"{folder}/beside", every=1)

    def beside(losses: Tensor) -> None:
        second(losses)
        plain(losses)

    return {"backward": first.backward, "beside": beside}


def step(task: Task, backward: Backward) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    backward(task.losses())
    task.model.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def overhead(task: Task, backward: Backward) -> tuple[float, float]:
    """Of one round: percent of a loop in which every tenth step is logged, and the plain step in ms."""
    step(task, plain)
    bare, logged, after = step(task, plain), step(task, backward), step(task, plain)
    return 100 * (logged + after - 2 * bare) / (EVERY * bare), 1e3 * bare


def measured(name: str, rounds: int, budget: float, threads: int) -> dict[str, Any]:
    """The overhead of each way in percent, over rounds in which they take turns."""
    torch.set_num_threads(threads)
    task, others, found = WORKLOADS[name].build(), environment.Others(), dict[str, list[tuple[float, float]]]()
    with tempfile.TemporaryDirectory() as folder:
        candidates = ways(task, folder)
        for backward in candidates.values():
            overhead(task, backward)
        start = time.perf_counter()
        for done in range(rounds):
            if done > 2 and time.perf_counter() - start > budget:
                break
            for way, backward in candidates.items():
                found.setdefault(way, []).append(overhead(task, backward))
    return {
        "workload": name,
        "others": round(others.cores() or 0.0, 2),
        "rounds": len(found["backward"]),
        "plain_ms": spread([ms for rows in found.values() for _, ms in rows]),
        **{way: spread([percent for percent, _ in rows]) for way, rows in found.items()},
    }


def table(report: dict[str, Any]) -> str:
    """Markdown: workloads by ways, medians and quartiles."""
    where = report["environment"]
    lines = ["| | plain step, ms | " + " | ".join(f"`{title}`" for title in WAYS) + " |", "|---" + "|---:" * 3 + "|"]
    for row in report["rows"]:
        cells = [f"{row[w]['median']:.1f}% ({row[w]['q1']:.1f} to {row[w]['q3']:.1f})" for w in WAYS.values()]
        lines.append(f"| {row['workload']} | {row['plain_ms']['median']:.1f} | " + " | ".join(cells) + " |")
    busy = max(row["others"] for row in report["rows"])
    doubt = f"; **doubtful**, other programs kept up to {busy} cores busy" if busy > DISTURBED else ""
    machine = f"torch {where['torch']}, {report['threads']} threads on {where['cores']} cores of {where['cpu']}"
    return "\n".join(
        [*lines, "", f"{where['date'][:10]}, commit {(where['commit'] or 'none')[:12]}, {machine}{doubt}.\n"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitor", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=MAIN, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=200, help="at most")
    parser.add_argument("--budget", type=float, default=25.0, help="seconds per workload, after three rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--page", type=Path, help="put the table between this page's markers")
    args = parser.parse_args(argv)
    where = environment.describe()
    rows = [forked(measured, name, args.rounds, args.budget, args.threads) for name in args.workloads]
    report = {"environment": where, "every": EVERY, "threads": args.threads, "rows": rows}
    print(table(report))
    write(args.json, report)
    if args.page is not None:
        page = args.page.read_text()
        args.page.write_text(MARKED.sub(lambda m: f"{m['begin']}{table(report)}{m['end']}", page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
