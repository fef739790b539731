"""`python -m benchmarks.loops`: packed sequences, and loops over samples, chunks and steps, beside a plain step.

Losses are built anew in every round, a plain step being ``losses.sum().backward()``. All take turns. What is told is
CPU time on one thread, by lower quartiles. Packed sequences are of the same lengths in every round, whose plan is then
recalled, or of new ones, which are planned anew (``changing``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import persample as ps

from . import environment
from .run import write

Losses = Callable[[], Tensor]


def packed(
    kind: type[nn.RNNBase], samples: int, steps: int, width: int, *, changing: bool = False
) -> tuple[nn.Module, Losses]:
    """Sequences of random lengths, and the mean of their outputs."""
    net, head = kind(width // 2, width, batch_first=True), nn.Linear(width, 5)
    x, y = torch.randn(samples, steps, width // 2), torch.randint(5, (samples,))
    lengths = torch.randint(1, steps + 1, (samples,))

    def losses() -> Tensor:
        n = torch.randint(1, steps + 1, (samples,)) if changing else lengths
        out, _ = net(pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))
        hidden, _ = pad_packed_sequence(out, batch_first=True)
        return F.cross_entropy(head(hidden.sum(1) / n.unsqueeze(1)), y, reduction="none")

    return nn.ModuleList([net, head]), losses


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width // 2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def over_samples(samples: int, width: int) -> tuple[nn.Module, Losses]:
    """One sample at a time."""
    model, x, y = _mlp(width), torch.randn(samples, width // 2), torch.randint(10, (samples,))
    return model, lambda: torch.stack([F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(samples)])


def over_sequences(samples: int, steps: int, width: int) -> tuple[nn.Module, Losses]:
    """One sequence at a time, of random lengths, through a block of a transformer."""
    table, head = nn.Embedding(100, width), nn.Linear(width, 5)
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    texts = [torch.randint(100, (1, int(n))) for n in torch.randint(1, steps + 1, (samples,))]
    y = torch.randint(5, (samples, 1))

    def losses() -> Tensor:
        return torch.stack([F.cross_entropy(head(block(table(x)).mean(1)), t) for x, t in zip(texts, y, strict=True)])

    return nn.ModuleList([table, block, head]), losses


def over_chunks(samples: int, chunk: int, width: int) -> tuple[nn.Module, Losses]:
    """A few samples at a time."""
    model, x, y = _mlp(width), torch.randn(samples, width // 2), torch.randint(10, (samples,))
    parts = list(zip(x.split(chunk), y.split(chunk), strict=True))
    return model, lambda: torch.cat([F.cross_entropy(model(a), b, reduction="none") for a, b in parts])


def over_steps(samples: int, steps: int, width: int) -> tuple[nn.Module, Losses]:
    """All samples, one step at a time."""
    cell, head = nn.GRUCell(width // 2, width), nn.Linear(width, 5)
    x, y = torch.randn(steps, samples, width // 2), torch.randint(5, (samples,))

    def losses() -> Tensor:
        h = torch.zeros(samples, width)
        for step in x:
            h = cell(step, h)
        return F.cross_entropy(head(h), y, reduction="none")

    return nn.ModuleList([cell, head]), losses


PROGRAMS: dict[str, Callable[[], tuple[nn.Module, Losses]]] = {
    "packed GRU, 32 x 20, width 64": lambda: packed(nn.GRU, 32, 20, 64),
    "packed GRU, 64 x 50, width 128": lambda: packed(nn.GRU, 64, 50, 128),
    "packed GRU, 64 x 50, width 128, changing": lambda: packed(nn.GRU, 64, 50, 128, changing=True),
    "packed LSTM, 64 x 50, width 128": lambda: packed(nn.LSTM, 64, 50, 128),
    "packed LSTM, 64 x 50, width 128, changing": lambda: packed(nn.LSTM, 64, 50, 128, changing=True),
    "packed LSTM, 64 x 50, width 256, changing": lambda: packed(nn.LSTM, 64, 50, 256, changing=True),
    "loop over samples, MLP, 32, width 64": lambda: over_samples(32, 64),
    "loop over samples, MLP, 64, width 256": lambda: over_samples(64, 256),
    "loop over sequences, 64 x 50, width 128": lambda: over_sequences(64, 50, 128),
    "loop over chunks, MLP, 64 by 8, width 256": lambda: over_chunks(64, 8, 256),
    "loop over chunks, MLP, 60 by 7, width 64": lambda: over_chunks(60, 7, 64),
    "loop over steps, GRU cell, 32 x 20, width 64": lambda: over_steps(32, 20, 64),
}


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a plain step, and of norms and clipped sums as multiples of it."""
    torch.manual_seed(0)
    model, losses = PROGRAMS[name]()

    def plain() -> None:
        losses().sum().backward()
        model.zero_grad(set_to_none=True)

    ways: dict[str, Callable[[], Any]] = {
        "plain": plain,
        "norms": lambda: ps.norms(losses(), model),
        "clipped_sum": lambda: ps.clipped_sum(losses(), model, max_norm=1.0),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for done in range(rounds + 2):
        for way, run in ways.items():
            start = time.process_time()
            run()
            times[way] += [time.process_time() - start] if done > 1 else []
    lower = {way: sorted(every)[len(every) // 4] for way, every in times.items()}
    ratios = {way: round(lower[way] / lower["plain"], 2) for way in ways if way != "plain"}
    return {"program": name, "plain_ms": round(1e3 * lower["plain"], 2), **ratios}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loops", description=__doc__)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for name in args.programs:
        rows.append(measured(name, args.rounds))
        print(
            "{program:45s} {plain_ms:8.1f} ms   norms {norms:5.2f}   clipped_sum {clipped_sum:5.2f}".format(**rows[-1])
        )
    write(args.json, {"environment": environment.describe(), "threads": 1, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
