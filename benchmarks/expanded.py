"""`make bench-expanded`: `call_for_per_sample_grads` against PyTorch's private one, on models that both can do.

One step is a call, a loss, a backward, and dropping the results. Both and a plain step take turns in one run.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads as peer_call

import persample as ps

from . import environment


@dataclass(frozen=True)
class Workload:
    """A model and its input."""

    name: str
    build: Callable[[], tuple[nn.Module, Tensor]]


class LastState(nn.Module):
    """A recurrent layer on embedded text, and a linear one on its last output."""

    def __init__(self, kind: Callable[..., nn.Module], hidden: int) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(1000, 64), kind(64, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(ids))[0][:, -1])  # type: ignore[no-any-return]


def _mlp() -> tuple[nn.Module, Tensor]:
    sizes = [784, 512, 512, 10]
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(64, 784)


def _positions() -> tuple[nn.Module, Tensor]:
    blocks = [part for _ in range(4) for part in (nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU())]
    return nn.Sequential(nn.Embedding(1000, 128), *blocks, nn.Linear(128, 100)), torch.randint(1000, (16, 64))


def _cnn(groups: int, channels: int = 32, batch: int = 32) -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(channels, channels, 3, padding=1, groups=groups), nn.GroupNorm(4, channels), nn.ReLU()]
        layers += [nn.Conv2d(channels, channels, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 256, 10)), torch.randn(batch, 3, 16, 16)


def _recurrent(kind: Callable[..., nn.Module]) -> tuple[nn.Module, Tensor]:
    return LastState(kind, 128), torch.randint(1000, (16, 32))


TABLE = [
    Workload("linear", _mlp),
    Workload("linear, B=4", lambda: (_mlp()[0], torch.randn(4, 784))),
    Workload("embedding, layer norm", _positions),
    Workload("conv2d", lambda: _cnn(1)),
    Workload("conv2d, 8 groups", lambda: _cnn(8, channels=64)),
    Workload("conv2d, depthwise", lambda: _cnn(64, channels=64)),
    Workload("lstm", lambda: _recurrent(nn.LSTM)),
    Workload("gru", lambda: _recurrent(nn.GRU)),
]


def _steps(model: nn.Module, x: Tensor) -> dict[str, Callable[[], None]]:
    """A plain step, and one of each contender."""

    def clear() -> None:
        for p in model.parameters():
            p.grad = p.grad_sample = None  # type: ignore[attr-defined]

    def plain() -> None:
        model(x).square().sum().backward()
        clear()

    def ours() -> None:
        ps.call_for_per_sample_grads(model)(x).square().sum().backward()
        clear()

    def theirs() -> None:
        peer_call(model)(x).square().sum().backward()  # type: ignore[no-untyped-call]
        clear()

    return {"plain": plain, "ours": ours, "pytorch": theirs}


def check(model: nn.Module, x: Tensor) -> float:
    """The largest difference between both, relative to the largest gradient of the parameter."""
    found = []
    for call in (ps.call_for_per_sample_grads, peer_call):
        call(model)(x).square().sum().backward()
        found.append([p.grad_sample for p in model.parameters()])
        for p in model.parameters():
            p.grad_sample = None  # type: ignore[attr-defined]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True))


def measure(workload: Workload, budget: float, fewest: int) -> dict[str, list[float]]:
    """Seconds per step, round after round, in an order that changes."""
    torch.manual_seed(0)
    model, x = workload.build()
    difference = check(model, x)
    if not difference <= 1e-3:  # NaN is a difference, too
        raise AssertionError(f"{workload.name}: both differ by {difference:.1e}, so there is nothing to compare")
    steps, seconds = _steps(model, x), {name: list[float]() for name in ("plain", "ours", "pytorch")}
    shuffle = random.Random(0).shuffle
    order, begin = list(steps), time.perf_counter()
    while len(seconds["plain"]) < fewest or time.perf_counter() - begin < budget:
        shuffle(order)
        for name in order:
            gc.collect()
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--budget", type=float, default=8.0, help="seconds per workload")
    parser.add_argument("--fewest", type=int, default=5, help="rounds at least")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    where = environment.describe()
    print(f"torch {where['torch']}, {where['threads']} threads, {where['cpu']}; medians of ratios within a round")
    print(f"{'workload':24}{'plain ms':>10}{'ours/plain':>12}{'pytorch/plain':>15}{'pytorch/ours':>14}")
    for workload in TABLE:
        times = measure(workload, args.budget, args.fewest)

        def ratio(a: str, b: str, times: dict[str, list[float]] = times) -> float:
            return median(x / y for x, y in zip(times[a], times[b], strict=True))

        print(
            f"{workload.name:24}{1e3 * median(times['plain']):10.1f}{ratio('ours', 'plain'):12.2f}"
            f"{ratio('pytorch', 'plain'):15.2f}{ratio('pytorch', 'ours'):14.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
