"""`make bench-several`: several losses per sample, as a table in docs/several.md and as JSON.

Every task has losses or outputs (B, K), a plain step (a forward pass and the backward of their mean), and ways to their
gradients or what is made of them, which take turns with the plain step on one thread. What counts is CPU time, forward
passes included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

import persample as ps

from . import environment
from .measure import spread
from .models import GPT
from .processes import forked
from .run import write
from .tables import MARKED

Way = Callable[[], Any]


@dataclass(frozen=True)
class Task:
    """A model, a function of it that gives losses (B, K), and ways to something about their gradients."""

    title: str
    losses: Callable[[], Tensor]
    ways: dict[str, Way]


def _mlp(width: int, out: int) -> nn.Sequential:
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out)]
    return nn.Sequential(*layers)


def _jacrev(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """(B, K, *shape) for every parameter, by ``torch.func``."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    rows = vmap(jacrev(lambda p, one: functional_call(model, p, (one,))), (None, 0))(params, x)
    return rows  # type: ignore[no-any-return]


def _norms_of_jacrev(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([g.flatten(2).norm(dim=2) for g in _jacrev(model, x).values()]).norm(dim=0)


def tokens_apart(width: int = 512, batch: int = 16, length: int = 32) -> Task:
    """Losses of tokens that know nothing of each other."""
    model, x = _mlp(width, 10), torch.randn(batch, length, width)

    def losses() -> Tensor:
        return model(x).square().mean(-1)

    ways: dict[str, Way] = {
        "ps.norms": lambda: ps.norms(losses(), model),
        "ps.clipped_sum": lambda: ps.clipped_sum(losses(), model, 1.0),
    }
    return Task(f"tokens apart, MLP of width {width}, ({batch}, {length})", losses, ways)


def logits(width: int = 512, batch: int = 64, classes: int = 10) -> Task:
    """All logits of a classifier."""
    model, x = _mlp(width, classes), torch.randn(batch, width)

    def losses() -> Tensor:
        return model(x)  # type: ignore[no-any-return]

    ways: dict[str, Way] = {
        "ps.norms": lambda: ps.norms(losses(), model),
        "K calls of ps.norms": lambda: _call_by_call(losses(), model),
        "norms of torch.func.jacrev": lambda: _norms_of_jacrev(model, x),
        "ps.clipped_sum": lambda: ps.clipped_sum(losses(), model, 1.0),
        "ps.gram": lambda: ps.gram(losses(), model),
    }
    return Task(f"logits, MLP of width {width}, ({batch}, {classes})", losses, ways)


def jacobian(width: int = 128, batch: int = 64, classes: int = 10) -> Task:
    """The Jacobian of all logits, written out."""
    model, x = _mlp(width, classes), torch.randn(batch, width)

    def losses() -> Tensor:
        return model(x)  # type: ignore[no-any-return]

    ways: dict[str, Way] = {
        "ps.jacobian": lambda: ps.jacobian(losses(), model),
        "torch.func.jacrev": lambda: _jacrev(model, x),
    }
    return Task(f"Jacobian of logits, MLP of width {width}, ({batch}, {classes})", losses, ways)


def tokens_of_gpt(width: int = 64, layers: int = 4, batch: int = 4, length: int = 32) -> Task:
    """Losses of tokens that attend to each other."""
    model, ids = GPT(width, layers, 4, 64, length), torch.randint(64, (batch, length + 1))

    def losses() -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")

    ways: dict[str, Way] = {
        "ps.norms": lambda: ps.norms(losses(), model),
        "K calls of ps.norms": lambda: _call_by_call(losses(), model),
    }
    return Task(f"tokens of a GPT, {layers} layers of width {width}, ({batch}, {length})", losses, ways)


def _call_by_call(losses: Tensor, model: nn.Module) -> Tensor:
    """(B, K): one call for every position."""
    *others, last = losses.unbind(1)
    norms = [ps.norms(each, model, retain_graph=True) for each in others]
    return torch.stack([*norms, ps.norms(last, model)], 1)


TASKS = {"tokens-apart": tokens_apart, "logits": logits, "jacobian": jacobian, "tokens-of-gpt": tokens_of_gpt}


def _seconds(way: Way) -> float:
    start = time.process_time()
    way()
    return time.process_time() - start


def measured(name: str, rounds: int, sizes: dict[str, int] | None = None) -> dict[str, Any]:
    """The ratio of every way to the plain step, over rounds in which they take turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = TASKS[name](**(sizes or {}))
    others, found, plain = environment.Others(), {way: list[float]() for way in task.ways}, list[float]()

    def step() -> None:
        task.losses().mean().backward()

    for way in [step, *task.ways.values()]:
        _seconds(way)
    for _ in range(rounds):
        _seconds(step)
        plain.append(_seconds(step))
        for title, way in task.ways.items():
            found[title].append(_seconds(way) / plain[-1])
    return {
        "task": task.title,
        "others": round(others.cores() or 0.0, 2),
        "plain_ms": spread([1e3 * seconds for seconds in plain]),
        "ratios": {title: spread(ratios) for title, ratios in found.items()},
    }


def table(report: dict[str, Any]) -> str:
    """Markdown: medians and quartiles of ratios to a plain step."""
    where, lines = report["environment"], ["| | | times a plain step |", "|---|---|---:|"]
    for row in report["rows"]:
        for title, ratio in row["ratios"].items():
            lines.append(
                f"| {row['task']} | {title} | {ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f}) |"
            )
    machine = f"torch {where['torch']}, one thread of {where['cpu']}, {report['rounds']} rounds, CPU time"
    return "\n".join([*lines, "", f"{where['date'][:10]}, commit {(where['commit'] or 'none')[:12]}, {machine}.\n"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.several", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--page", type=Path, help="put the table between this page's markers")
    args = parser.parse_args(argv)
    rows = [forked(measured, name, args.rounds) for name in args.tasks]
    report = {"environment": environment.describe(), "rounds": args.rounds, "rows": rows}
    print(table(report))
    write(args.json, report)
    if args.page is not None:
        page = args.page.read_text()
        args.page.write_text(MARKED.sub(lambda m: f"{m['begin']}{table(report)}{m['end']}", page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
