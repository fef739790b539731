"""``python -m benchmarks.worker METHOD WORKLOAD...``: one method in one process, a line of JSON per finding.

The result is compared with the samples' gradients one by one before anything is timed. Time and memory are measured
in forks of this process: memory needs an allocator that gives back at once what is freed, and a heap without holes.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .environment import Others
from .measure import Effort, second_half, take_turns, whole_step
from .memory import step_bytes
from .methods import METHODS, PLAIN, Method
from .processes import forked
from .reference import WrongResult, check
from .workloads import WORKLOADS, Task


def main(argv: Sequence[str] | None = None) -> None:
    """Print what is found as soon as it is known."""
    args = _arguments(argv)
    if args.memory_limit:
        limit = int(args.memory_limit * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    effort = Effort(args.rounds, args.budget, args.fewest, args.warm_up)
    for name in args.workloads:
        row = _row(name, args, effort)
        print(json.dumps(row), flush=True)
        if row["status"] in ("memory", "crashed") or row.get("ms", {}).get("min", 0) > 1e3 * args.longest:
            break


def _row(name: str, args: argparse.Namespace, effort: Effort) -> dict[str, Any]:
    row: dict[str, Any] = {"workload": name, "method": args.method}
    try:
        row |= forked(_timing, args.method, name, args.threads, effort)
        if args.memory and row["status"] in ("ok", "unchecked"):
            row["bytes"] = forked(_memory, args.method, name, args.threads)
    except RuntimeError as crash:  # the process was ended by the system, or memory did not suffice for the second one
        row |= {"status": "crashed", "reason": _first_line(str(crash))}
    return row


def _timing(method: str, workload: str, threads: int, effort: Effort) -> dict[str, Any]:
    torch.set_num_threads(threads)
    return measured(METHODS[method], WORKLOADS[workload].build(), effort)


def _memory(method: str, workload: str, threads: int) -> dict[str, int]:
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    return step_bytes(METHODS[method], WORKLOADS[workload])


def measured(method: Method, task: Task, effort: Effort) -> dict[str, Any]:
    """What is known of a method on a task, or why it is not timed."""
    if not method.installed():
        return {"status": "missing", "reason": f"{method.needs} is not installed"}
    if not effort.rounds:
        return {"status": "unchecked"}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.perf_counter()
            contender = method.prepare(task)
            seconds = time.perf_counter() - start
            error = check(task, method.kind, contender.step())
    except WrongResult as wrong:
        return {"status": "wrong", "reason": str(wrong)}
    except Exception as failure:
        status = "memory" if "allocate memory" in str(failure) else "fails"
        return {"status": status, "reason": f"{type(failure).__name__}: {_first_line(str(failure))}"}
    others = Others()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timed = whole_step if method.with_forward else second_half
        timing = take_turns(PLAIN.prepare(task), lambda: timed(contender), effort)
    return {
        "status": "ok",
        "error": float(f"{error:.2g}"),
        "seconds_before": float(f"{seconds:.3g}"),
        "parameters": sum(p.numel() for p in task.params().values()),
        **timing.as_json(),
        "others": round(others.cores() or 0.0, 2),
        "slow_paths": sorted(_slow_paths(caught)),
    }


def _slow_paths(caught: Sequence[warnings.WarningMessage]) -> Iterator[str]:
    """Of all warnings those that speak of time, ours and vmap's."""
    for text in {_first_line(str(warning.message)) for warning in caught}:
        if "slow" in text or "performance" in text:
            yield text


def _first_line(text: str) -> str:
    """Without what PyTorch adds about itself."""
    return text.strip().partition("\n")[0].partition(" Please file")[0][:300]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker", description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("workloads", nargs="+", choices=WORKLOADS, metavar="workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100, help="0: no timing")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds, after which no round is begun")
    parser.add_argument("--fewest", type=int, default=5, help="rounds at least")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that do not count")
    parser.add_argument(
        "--longest", type=float, default=60.0, help="seconds of a step after which larger ones are left"
    )
    parser.add_argument("--memory", action="store_true", help="measure peak memory, too")
    parser.add_argument("--memory-limit", type=float, default=0.0, metavar="GB", help="of address space")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
