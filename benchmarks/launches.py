"""``python -m benchmarks.launches``: launches and waits of a step, and what the host does for each node of a graph.

Launches and waits are counted by `persample.testing.count_work` on the strict device of the tests: every op that comes
to the dispatcher, but views and memory, is one launch. What is counted is the third step of a loop that sets gradients
to None between steps. No timing and no CPU's kind has a part in it.

The host's own time is measured on the CPU, as ``benchmarks.run --parts`` does, with one thread: reading the graph and
recalling its plan, and a whole capture without PyTorch's part of the backward, over the number of the graph's nodes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import persample as ps
from persample.graph.read.roots import Roots
from persample.testing import Work, count_work
from tests.device.backend import DEVICE, raise_refused

from . import environment
from .contender import MAX_NORM
from .measure import second_half, spread, whole_step
from .methods import METHODS, PLAIN
from .run import write
from .tables import RESULTS, host_time, launch_counts
from .workloads import DEFAULT, WORKLOADS, Task

HOST = ["gpt-thin", "mlp-deep"]  # many small ops: there, the host's time is most of all
Verb = Callable[[Tensor, nn.Module], Any]
VERBS: dict[str, tuple[str, Verb]] = {
    "plain": ("plain step", lambda losses, model: losses.sum().backward()),
    "norms": ("ps.norms", lambda losses, model: ps.norms(losses, model)),
    "clipped_sum": ("ps.clipped_sum", lambda losses, model: ps.clipped_sum(losses, model, MAX_NORM)),
    "backward": ("ps.backward(ClippedSum)", lambda losses, model: ps.backward(losses, model, ps.ClippedSum(MAX_NORM))),
    "grad": ("ps.grad", lambda losses, model: ps.grad(losses, model)),
}


def on_device(name: str, batch: int | None = None) -> Task:
    """A workload on the strict device."""
    task = WORKLOADS[name].build(batch)
    return replace(task, model=task.model.to(DEVICE), inputs=tuple(t.to(DEVICE) for t in task.inputs))


def counted(task: Task, verb: str, steps: int = 3) -> Work:
    """What the last of some steps asks for."""
    for _ in range(steps):
        task.model.zero_grad(set_to_none=True)
        with count_work() as work:
            VERBS[verb][1](task.losses(), task.model)
    raise_refused()
    return work


def count_rows(names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for every workload and verb."""
    rows = []
    for name in names:
        task = on_device(name)
        for verb in VERBS:
            print(f"counting {name}: {verb}", file=sys.stderr, flush=True)
            work = counted(task, verb)
            rows.append(
                {"workload": name, "method": verb, "launches": work.launches.total(), "waits": dict(work.waits)}
            )
    return rows


def host_rows(names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Microseconds per node: the graph read, the capture beyond PyTorch's backward, and a whole plain step."""
    rows = []
    for name in names:
        print(f"timing {name}", file=sys.stderr, flush=True)
        task, others = WORKLOADS[name].build(), environment.Others()
        nodes = len(Roots.of_losses(task.losses()).read().nodes)
        plain, (plan, bare, capture) = (
            PLAIN.prepare(task),
            (METHODS[m].prepare(task) for m in ("plan", "bare", "capture")),
        )
        found: dict[str, list[float]] = {"read": [], "capture": [], "plain": []}
        for done in range(-5, rounds):  # the first to warm up
            step, read, rest, whole = whole_step(plain), second_half(plan), second_half(bare), second_half(capture)
            if done >= 0:
                for part, seconds in (("read", read), ("capture", whole - rest), ("plain", step)):
                    found[part].append(1e6 * seconds / nodes)
        busy = round(others.cores() or 0.0, 2)
        rows.append(
            {"workload": name, "nodes": nodes, "rounds": rounds, "others": busy}
            | {k: spread(v) for k, v in found.items()}
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=DEFAULT, metavar="NAME")
    parser.add_argument(
        "--host", nargs="*", choices=WORKLOADS, default=HOST, metavar="NAME", help="whose nodes are timed"
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="PATH", default=RESULTS / "launches.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    report = {
        "environment": environment.describe(),
        "methods": {verb: {"title": title} for verb, (title, _) in VERBS.items()},
        "workloads": {
            name: {"title": WORKLOADS[name].title, "batch": WORKLOADS[name].batch} for name in args.workloads
        },
        "host": host_rows(args.host, args.rounds),
        "rows": count_rows(args.workloads),
    }
    print(launch_counts(report))
    print(host_time(report))
    write(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
