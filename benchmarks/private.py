"""`make bench-private`: what a private training step costs, in samples per second, beside Opacus.

One step is a forward pass, gradients, and an optimizer step of plain SGD; the private ones clip to the same norm, add
the same noise and keep accounts. All contenders train copies of one model on one batch, in one process, taking turns in
an order that changes; a turn is one step that is not timed and one that is.

`dp.Private` goes through its own loop: sampling with rate 1, so that all batches have the same size, a DataLoader whose
batch is ready, the checks of every step, and sub-batches run again at every hundredth. The others are handed the batch.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import persample as ps
from persample import dp
from persample.dp.noise import Scale, add_noise
from persample.dp.sources import Secure

from . import environment
from .contender import MAX_NORM
from .measure import spread
from .peers import for_opacus
from .run import DISTURBED, add_common, write
from .workloads import WORKLOADS, Task

RATE = 1e-3  # of learning: what is trained matters little, and it must not diverge
NOISE = 1.0
DEFAULT = ["mlp", "cnn", "gpt", "lstm", "mlp-1m", "mlp-10m", "mlp-100m"]
MOST_BYTES = 8e9  # of gradients that a trainer may write out


@dataclass(frozen=True)
class Run:
    """A model in training."""

    model: nn.Module
    step: Callable[[], None]


@dataclass(frozen=True)
class Trainer:
    """A way to train a task's model, with this multiple of the clip as noise where it is private."""

    name: str
    title: str
    prepare: Callable[[Task, float], Run]
    needs: str = "torch"
    writes_out: bool = False  # the gradients of all samples


def _plain(task: Task, noise: float) -> Run:
    model, optimizer = _copied(task)

    def step() -> None:
        task.losses_fn(model, *task.inputs).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Run(model, step)


def _clipped(task: Task, noise: float) -> Run:
    """What a private step is measured by: no noise, no accounts, no checks, and the sum where others take the mean."""
    model, _ = _copied(task)
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=RATE / len(task.inputs[0]))

    def step() -> None:
        total = ps.clipped_sum(task.losses_fn(model, *task.inputs), model, max_norm=MAX_NORM)
        for name, p in params.items():
            p.grad = total[name]
        optimizer.step()
        optimizer.zero_grad()

    return Run(model, step)


def _private(secure: bool | None, task: Task, noise: float) -> Run:
    model, optimizer = _copied(task)
    batch = len(task.inputs[0])
    plan = dp.Plan(examples=batch, batch_size=batch, steps=10**6, noise_multiplier=noise, delta=1e-9, accountant="rdp")
    private = dp.Private(model, optimizer, plan, ps.ClippedSum(MAX_NORM), secure=secure)
    batches: Iterator[tuple[Tensor, ...]] = private.batches(range(batch), collate_fn=lambda _: task.inputs)

    def step() -> None:
        private.step(task.losses_fn(model, *next(batches)))

    return Run(model, step)


def _compiled(task: Task, noise: float) -> Run:
    model, optimizer = _copied(task)
    batch = len(task.inputs[0])
    plan = dp.Plan(examples=batch, batch_size=batch, steps=10**6, noise_multiplier=noise, delta=1e-9, accountant="rdp")
    losses_fn = partial(task.losses_fn, model)
    private = dp.Private(model, optimizer, plan, ps.ClippedSum(MAX_NORM), compile=lambda *given: losses_fn(*given))
    batches: Iterator[tuple[Tensor, ...]] = private.batches(range(batch), collate_fn=lambda _: task.inputs)
    return Run(model, lambda: private.step(*next(batches)) and None)


def _opacus_hooks(task: Task, noise: float) -> Run:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model, optimizer = _copied(task, for_opacus)
    wrapped = GradSampleModule(model)
    private = DPOptimizer(
        optimizer, noise_multiplier=noise, max_grad_norm=MAX_NORM, expected_batch_size=len(task.inputs[0])
    )

    def step() -> None:
        task.losses_fn(wrapped, *task.inputs).mean().backward()
        private.step()
        private.zero_grad(set_to_none=True)

    return Run(model, step)


def _opacus_ghost(task: Task, noise: float) -> Run:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    model, optimizer = _copied(task, for_opacus)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=MAX_NORM, use_ghost_clipping=True)
    private = DPOptimizerFastGradientClipping(
        optimizer, noise_multiplier=noise, max_grad_norm=MAX_NORM, expected_batch_size=len(task.inputs[0])
    )

    def step() -> None:
        losses = task.losses_fn(wrapped, *task.inputs)
        DPTensorFastGradientClipping(wrapped, private, losses, loss_reduction="mean").backward()
        private.step()
        private.zero_grad(set_to_none=True)

    return Run(model, step)


def _copied(task: Task, copy: Callable[[nn.Module], nn.Module] = deepcopy) -> tuple[nn.Module, torch.optim.SGD]:
    model = copy(task.model)
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


TRAINERS = [
    Trainer("plain", "plain step", _plain),
    Trainer("clipped", "ps.clipped_sum, optimizer", _clipped),
    Trainer("private", "dp.Private", partial(_private, None)),
    Trainer("insecure", "dp.Private, secure=False", partial(_private, False)),
    Trainer("opacus-hooks", "Opacus", _opacus_hooks, needs="opacus", writes_out=True),
    Trainer("opacus-ghost", "Opacus ghost", _opacus_ghost, needs="opacus"),
]


COMPILED = [*TRAINERS[:3], Trainer("compiled", "dp.Private, compile=", _compiled)]


def measured(workload: str, budget: float, fewest: int, trainers: Sequence[Trainer] = TRAINERS) -> list[dict[str, Any]]:
    """A row per trainer: times, samples per second, and ratios within a round to the plain and the clipped step."""
    task, batch = WORKLOADS[workload].build(), WORKLOADS[workload].batch
    size = sum(p.numel() for p in task.model.parameters())
    runs, rows = {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for trainer in trainers:
            row: dict[str, Any] = {"workload": workload, "trainer": trainer.name}
            if find_spec(trainer.needs) is None:
                row |= {"status": "missing", "reason": f"{trainer.needs} is not installed"}
            elif trainer.writes_out and 4 * batch * size > MOST_BYTES:
                row |= {"status": "too large", "reason": f"gradients of {4 * batch * size / 1e9:.0f} GB"}
            else:
                runs[trainer.name] = trainer.prepare(task, NOISE)
            rows[trainer.name] = row
        others = environment.Others()
        seconds = take_turns({name: run.step for name, run in runs.items()}, budget, fewest)
    busy = round(others.cores() or 0.0, 2)
    for name, times in seconds.items():
        rows[name] |= {"status": "ok", "rounds": len(times), "ms": spread([1e3 * t for t in times]), "others": busy}
        rows[name]["samples_per_second"] = {
            "median": round(batch / median(times), 1),
            "best": round(batch / min(times), 1),
        }
        rows[name]["ratio"] = {
            base: spread([a / b for a, b in zip(times, seconds[base], strict=True)]) for base in ("plain", "clipped")
        }
    rows["private"]["noise_ms"] = spread([1e3 * t for t in noise_alone(task, fewest)])
    rows["private"]["parameters"] = size
    return list(rows.values())


def take_turns(steps: dict[str, Callable[[], None]], budget: float, fewest: int) -> dict[str, list[float]]:
    """Seconds per step, round after round. The first rounds, in which all find their memory, do not count."""
    seconds = {name: list[float]() for name in steps}
    for step in steps.values():
        for _ in range(3):  # dp.Private runs sub-batches again in the first two
            step()
    order, shuffle, begin = list(steps), random.Random(0).shuffle, time.perf_counter()
    while len(seconds[order[0]]) < fewest or time.perf_counter() - begin < budget:
        shuffle(order)
        for name in order:
            steps[name]()
            gc.collect()
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def noise_alone(task: Task, times: int) -> list[float]:
    """Seconds for the noise of a step, without the step."""
    sums = [torch.zeros_like(p) for p in task.model.parameters()]
    scale, source = Scale(MAX_NORM, NOISE, sum(t.numel() for t in sums)), Secure()
    found = []
    for step in range(times + 1):
        start = time.perf_counter()
        add_noise(sums, scale, source, step)
        found.append(time.perf_counter() - start)
    return found[1:]


def cell(row: dict[str, Any]) -> str:
    """Samples per second, and the ratio to the clipped step."""
    if row["status"] != "ok":
        return str(row["status"])
    return f"{row['samples_per_second']['median']:.0f} ({row['ratio']['clipped']['median']:.2f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row as soon as it is known, and write the JSON at the end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.private", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=DEFAULT, metavar="NAME")
    parser.add_argument(
        "--budget", type=float, default=15.0, help="seconds per workload, once the fewest rounds are done"
    )
    parser.add_argument("--compiled", action="store_true", help="compiled steps, in place of other libraries")
    add_common(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    trainers = COMPILED if args.compiled else TRAINERS
    budget, fewest = (0.0, 2) if args.quick else (args.budget, args.rounds or 5)
    where = environment.describe()
    print(f"\ntorch {where['torch']}, {where['threads']} threads on {where['cores']} cores of {where['cpu']}")
    print("samples per second, median over rounds, and (time relative to ps.clipped_sum and optimizer)\n")
    print(f"{'workload':<12}{'B':>4}" + "".join(f"{t.name:>16}" for t in trainers) + f"{'noise alone':>16}", flush=True)
    rows = []
    for workload in args.workloads:
        found = measured(workload, budget, fewest, trainers)
        noise = next(row for row in found if row["trainer"] == "private")["noise_ms"]["median"]
        print(f"{workload:<12}{WORKLOADS[workload].batch:>4}" + "".join(f"{cell(row):>16}" for row in found), end="")
        print(f"{f'{noise:.3g} ms':>16}", flush=True)
        rows += found
    busy = max(row.get("others", 0.0) for row in rows)
    if busy > DISTURBED:
        print(f"doubtful: other programs kept up to {busy} cores busy")
    titles = {t.name: {"title": t.title} for t in trainers}
    write(args.json, {"environment": where, "trainers": titles, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
