"""`make bench-sensitivity`: how far one sample moves a private sum, over the bound that is promised.

Two runs of `dp.Private` on neighbouring datasets, one without its first example, and the difference of what they would
release but for the noise. The data are chosen against sums in floating point: half of the examples park the sum at a
power of two, and the others are a little more than half of a last digit there. Rounded up every time, they add twice
what they are; with one example less, the sum is below that power of two and they add what they are. Beside it, the same
for `ps.clipped_sum` of parts of the batch that are added up in the parameters' dtype.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample import dp
from persample.dp.sums import Line, Whole
from persample.dp.team import AddNoise

BATCHES = {512: 1, 8192: 8192, 100_000: 100_000}  # samples, and how many of them at a time
PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "autocast": torch.float32}


class Task(nn.Module):
    """One loss per sample whose gradient is the sample itself, in the first element of a weight."""

    def __init__(self, weight: Tensor, score: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.score = nn.Parameter(weight), score

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.weight, x)


def _positions(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    def score(w: Tensor, x: Tensor) -> Tensor:
        h = F.pad(x.view(-1, 1, 1), (0, 3, 0, count - 1)).to(w.dtype)  # (B, T, 4), of which one element is not zero
        return F.linear(h, w)[..., :1].float().sum((1, 2))

    return score


def _convolution(w: Tensor, x: Tensor) -> Tensor:
    image = F.pad(x.view(-1, 1, 1, 1), (2, 2, 2, 2)).to(w.dtype)
    return F.conv2d(image, w)[:, 0, 2, 2].float()


def _tied(w: Tensor, x: Tensor) -> Tensor:
    row = F.embedding(torch.zeros(len(x), dtype=torch.long), w)
    hidden = F.pad(torch.ones(len(x), 1, dtype=w.dtype), (0, w.shape[1] - 1))
    return (row[:, 0] + F.linear(hidden, w)[:, 0]).float() * x.float() / 2


TASKS: dict[str, Callable[[], Task]] = {
    "scale": lambda: Task(torch.ones(4), lambda w, x: (w * F.pad(x.view(-1, 1), (0, 3)).to(w.dtype)).float().sum(1)),
    "linear": lambda: Task(torch.ones(3, 4), _positions(1)),
    "linear, 5 positions": lambda: Task(torch.ones(3, 4), _positions(5)),
    "linear, 40 positions": lambda: Task(torch.ones(3, 4), _positions(40)),
    "convolution": lambda: Task(torch.ones(2, 1, 3, 3), _convolution),
    "embedding": lambda: Task(
        torch.ones(5, 4),
        lambda w, x: F.embedding(torch.zeros(len(x), dtype=torch.long), w)[:, 0].float() * x.float(),
    ),
    "tied": lambda: Task(torch.ones(5, 4), _tied),
}


def ratchet(batch: int, digits: int) -> Tensor:
    """(batch,): the first half, or as many as are a power of two, are 1; the others half of a last digit and more."""
    parked = 2 ** int(math.log2(batch / 2))
    x = torch.ones(batch, dtype=torch.float64)
    x[parked:] = 0.51 * parked * 2.0 ** (1 - digits)
    return x


class Kept(dp.Team):
    """One process that keeps what it would give to the parameters, in float64."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def release(self, sums: Sequence[Whole], add_noise: AddNoise) -> Line:
        """As always; before they are means in the parameters' dtype, which is no matter of privacy any more."""
        line = super().release(sums, add_noise)
        self.kept += [t.clone() for t in line.tensors]
        return line


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    task: str
    precision: str
    batch: int
    physical: int

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and data."""
        return PRECISIONS[self.precision]

    def cast(self) -> AbstractContextManager[object]:
        """Around the forward pass."""
        if self.precision != "autocast":
            return nullcontext()
        return torch.autocast("cpu", torch.bfloat16)


def released(setting: Setting, x: Tensor) -> Tensor:
    """What a private step would release, but for the noise."""
    model, team = TASKS[setting.task]().to(setting.dtype), Kept()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = dp.Plan(examples=len(x), batch_size=len(x), steps=1, noise_multiplier=0.0, delta=1e-9, accountant="rdp")
        options = {"check_every": 0, "team": team}
        private = dp.Private(model, torch.optim.SGD(model.parameters(), lr=0.0), plan, ps.ClippedSum(1.0), **options)  # type: ignore[arg-type]
    items = x.to(setting.dtype)
    for batch in private.batches(items, physical_batch_size=setting.physical):
        with setting.cast():
            losses = model(batch)
        private.step(losses)
    return torch.cat([t.flatten() for t in team.kept])


def in_floating_point(setting: Setting, x: Tensor) -> Tensor:
    """The same by sums in the parameters' dtype."""
    model = TASKS[setting.task]().to(setting.dtype)
    total = torch.zeros_like(model.weight.detach())
    for part in x.to(setting.dtype).split(setting.physical):
        with setting.cast():
            losses = model(part)
        total += ps.clipped_sum(losses, model, max_norm=1.0)["weight"]
    return total.flatten().double()


def measured(setting: Setting) -> tuple[float, float]:
    """How far the first sample moves the sum, of `dp.Private` and in floating point, over the bound."""
    x = ratchet(setting.batch, 24 if setting.dtype == torch.float32 else 53)
    return tuple(float((find(setting, x) - find(setting, x[1:])).norm()) for find in (released, in_floating_point))  # type: ignore[return-value]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row as soon as it is known; exit code 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sensitivity", description=__doc__)
    parser.add_argument("--samples", nargs="+", type=int, default=list(BATCHES), choices=BATCHES)
    args = parser.parse_args(argv)
    print(f"{'task':<22}{'precision':<11}{'samples':>8}{'at a time':>11}{'dp.Private':>14}{'in floats':>12}")
    most = 0.0
    for name in TASKS:
        for precision in PRECISIONS:
            for batch in args.samples:
                setting = Setting(name, precision, batch, BATCHES[batch])
                found, floats = measured(setting)
                most = max(most, found)
                row = f"{name:<22}{precision:<11}{batch:>8}{setting.physical:>11}{found:>14.9f}{floats:>12.4f}"
                print(row, flush=True)
    print(f"the most that one sample moves: {most:.9f} of the bound")
    return int(most > 1)


if __name__ == "__main__":
    sys.exit(main())
