"""``python -m benchmarks.computed_weights``: weights that are computed from parameters, beside a plain step.

Times are CPU time on one thread, of whole steps that take turns with plain ones: a busy machine is then busy for both,
and waiting does not count. Memory is what a step takes above a plain one, in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import persample as ps

from . import environment
from .measure import Timing
from .memory import _forget_peak, _peak, _resident, _return_freed_memory
from .run import write
from .tables import RESULTS, computed_memory, computed_weights

B, P, D, R = 64, 512, 512, 8
POSITIONS = (1, 20)
MOST = 20_000_000  # max_memory where it is given
WIDE, MANY = 1024, 128  # rows and columns of a weight, and samples, where memory is measured
WORDS, WIDTH, LENGTH = 50_000, 64, 32  # of a table

Params = Mapping[str, Tensor]
_MASK = torch.rand(P, D, generator=torch.Generator().manual_seed(0)) > 0.5
_U, _V = F.normalize(torch.ones(P), dim=0), F.normalize(torch.ones(D), dim=0)


def _dora(p: Params) -> Tensor:
    w = p["w"] + p["a"] @ p["b"]
    return p["m"] * w / w.norm(dim=1, keepdim=True)


# What a weight (P, D) is computed by, and from which parameters.
WEIGHTS: dict[str, tuple[str, Callable[[Params], Tensor], str]] = {
    "none": ("`W`", lambda p: p["w"], "w"),
    "scale": ("`W * 0.5`", lambda p: p["w"] * 0.5, "w"),
    "mask": ("`W * mask`", lambda p: p["w"] * _MASK, "w"),
    "lora": ("`a @ b`", lambda p: p["a"] @ p["b"], "ab"),
    "lora beside": ("`W + a @ b`", lambda p: p["w"] + p["a"] @ p["b"], "wab"),
    "weight norm": ("weight norm", lambda p: torch._weight_norm(p["w"], p["m"], 0), "wm"),
    "columns": ("`W / W.norm(dim=0)`", lambda p: p["w"] / p["w"].norm(dim=0), "w"),
    "spectral norm": ("spectral norm", lambda p: p["w"] / torch.dot(_U, torch.mv(p["w"], _V)), "w"),
    "dora": ("DoRA", _dora, "wabm"),
    "tanh": ("`W.tanh()`", lambda p: p["w"].tanh(), "w"),
    "softmax": ("`W.softmax(1)`, written out", lambda p: p["w"].softmax(1), "w"),
}
SHAPES = {"w": (P, D), "a": (P, R), "b": (R, D), "m": (P, 1)}
VERBS: dict[str, Callable[[Tensor, Params], Any]] = {
    "norms": lambda losses, params: ps.norms(losses, params),
    "clipped_sum": lambda losses, params: ps.clipped_sum(losses, params, max_norm=1.0),
    "gram": lambda losses, params: ps.gram(losses, params),
}


def _weight(name: str, positions: int) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
    _, made, used = WEIGHTS[name]
    torch.manual_seed(0)
    params = {key: torch.randn(shape).mul_(0.05).requires_grad_() for key, shape in SHAPES.items()}
    x = torch.randn(B, positions, D).squeeze(1)
    return lambda: F.linear(x, made(params)).square().flatten(1).sum(1), {key: params[key] for key in used}


def _table(*, scaled: bool, tied: bool) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    table = torch.randn(WORDS, WIDTH).requires_grad_()
    s = torch.rand(WIDTH).requires_grad_()
    ids = torch.randint(WORDS, (B, LENGTH))

    def losses() -> Tensor:
        h = F.embedding(ids, table * s if scaled else table).tanh()
        return F.linear(h.mean(1), table).logsumexp(1) if tied else h.square().sum((1, 2))

    return losses, {"table": table, "s": s} if scaled else {"table": table}


Build = Callable[[], tuple[Callable[[], Tensor], dict[str, Tensor]]]


def cases() -> dict[str, tuple[str, Build, Sequence[str]]]:
    """What is timed: its title, how it is built, and what is asked."""
    found: dict[str, tuple[str, Build, Sequence[str]]] = {}
    for name, (title, _, _) in WEIGHTS.items():
        for T in POSITIONS:
            found[f"{name}, T={T}"] = title, lambda name=name, T=T: _weight(name, T), ("norms", "clipped_sum")
    found["scaled table"] = "`E * s`, a table", lambda: _table(scaled=True, tied=False), ("norms", "clipped_sum")
    found["table"] = "a table", lambda: _table(scaled=False, tied=False), ("norms", "clipped_sum", "gram")
    found["tied table"] = "a tied table", lambda: _table(scaled=False, tied=True), ("norms", "clipped_sum", "gram")
    return found


def timed(build: Build, verb: str, rounds: int) -> Timing:
    """CPU seconds of whole steps and of plain ones, in turns."""
    losses, params = build()

    def mine() -> None:
        VERBS[verb](losses(), params)

    def plain() -> None:
        losses().sum().backward()
        for p in params.values():
            p.grad = None

    timing = Timing([], [])
    for done in range(-2, rounds):
        spent = [_seconds(mine), _seconds(plain)]
        if done >= 0:
            timing.mine.append(spent[0])
            timing.plain.append(spent[1])
    return timing


def _seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def memory_above(weight: str, verb: str) -> int:
    """How many bytes a step takes at most, the forward pass included."""
    _return_freed_memory()
    torch.manual_seed(0)
    w = torch.randn(WIDE, WIDE).mul_(0.03).requires_grad_()
    made = {"tanh": lambda: w.tanh(), "softmax": lambda: w.softmax(1)}[weight]

    def step(samples: int) -> None:
        losses = (torch.randn(samples, WIDE) @ made()).square().sum(1)
        if verb == "plain":
            losses.sum().backward()
        elif verb == "norms":
            ps.norms(losses, [w], max_memory=MOST)
        else:
            ps.clipped_sum(losses, [w], max_norm=1.0, max_memory=MOST)

    step(2)
    w.grad = None
    ps.empty_cache()
    gc.collect()
    _forget_peak()
    before = _resident()
    step(MANY)
    return max(0, _peak() - before)


def memory_rows() -> list[dict[str, Any]]:
    """Each in a process of its own."""
    rows = []
    for weight in ("tanh", "softmax"):
        found = {}
        for verb in ("plain", "norms", "clipped_sum"):
            print(f"memory of {weight}: {verb}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "benchmarks.computed_weights", "--memory", weight, verb]
            done = subprocess.run(command, capture_output=True, check=True, text=True, cwd=environment.ROOT)
            found[verb] = json.loads(done.stdout)
        rows.append({"weight": WEIGHTS[weight][0].split(",")[0], "bytes": found})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.computed_weights", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=cases(), metavar="NAME", default=list(cases()))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, metavar="PATH", default=RESULTS / "computed-weights.json")
    parser.add_argument("--memory", nargs=2, metavar=("WEIGHT", "VERB"), help="print the bytes of one step, and stop")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ps.PerformanceWarning)
    if args.memory:
        print(memory_above(*args.memory))
        return 0
    rows = []
    for name in args.cases:
        title, build, verbs = cases()[name]
        for verb in verbs:
            print(f"timing {name}: {verb}", file=sys.stderr, flush=True)
            others = environment.Others()
            timing = timed(build, verb, args.rounds).as_json()
            busy = round(others.cores() or 0.0, 2)
            rows.append({"workload": name, "title": title, "method": verb, "status": "ok", "others": busy, **timing})
    report = {"environment": environment.describe(), "rows": rows, "memory": memory_rows()}
    write(args.json, report)
    print(computed_weights(report), computed_memory(report), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
