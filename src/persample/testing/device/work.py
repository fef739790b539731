"""What a step asks of the device: launches and waits, time and memory, beside a plain step."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ... import shortcuts, verbs
from ..._table import in_bytes
from ...reductions import ClippedSum
from ..counting import Work, count_work
from .answers import Check, Wrong, compare, flat
from .models import SIZES, Problem, build

__all__ = ["work"]

Verb = Callable[[Tensor, nn.Module], Any]
MAX_NORM = 0.5
# With how often the host may wait: clipped sums look once at whether any sample needs more care.
VERBS: dict[str, tuple[Verb, int]] = {
    "norms": (lambda losses, model: shortcuts.norms(losses, model), 0),
    "clipped_sum": (lambda losses, model: shortcuts.clipped_sum(losses, model, MAX_NORM), 1),
    "backward(ClippedSum)": (lambda losses, model: verbs.backward(losses, model, ClippedSum(MAX_NORM)), 1),
    "grad": (lambda losses, model: verbs.grad(losses, model), 0),
}


def work(device: torch.device, quick: bool) -> Iterator[Check]:
    """All that is counted and timed; ``quick`` with small models and few rounds."""
    makes = {
        name: partial(build, name, device) if quick else partial(build, name, device, size=size)
        for name, size in SIZES.items()
    }
    for name, make in makes.items():
        yield from (Check("launches and waits", f"{name}: {verb}", partial(_counted, make, verb)) for verb in VERBS)
    if device.type == "cuda":
        yield from (Check("side stream", name, partial(_side_stream, make)) for name, make in makes.items())
    rounds = 1 if quick else 15
    for name, make in makes.items():
        yield from (Check("time and memory", f"{name}: {verb}", partial(_timed, make, verb, rounds)) for verb in VERBS)


def _plain(losses: Tensor, model: nn.Module) -> None:
    losses.sum().backward()


def _step(problem: Problem, verb: Verb) -> None:
    """One step of a loop that lets go of its gradients."""
    for p in problem.model.parameters():
        p.grad = None
    verb(problem.losses(), problem.model)


def _counted(make: Callable[[], Problem], name: str) -> str:
    """Launches and waits of the third step, when the graph has been seen before."""
    (problem, plain), (verb, allowed) = _plain_work(make), VERBS[name]
    mine = _third_step(problem, verb)
    launches, usual = mine.launches.total(), plain.launches.total()
    ratio = f", {launches / usual:.2f} of a plain step's" if usual else ""
    remark = f"{mine}{ratio}"
    if problem.x.device.type == "cuda":
        stops = _synchronising_calls(problem, verb)
        remark += f"; {len(stops)} synchronising calls"
        if len(stops) > allowed:
            raise Wrong(f"{remark}, more than {allowed}: {stops[0]}")
    if mine.waits.total() > allowed:
        raise Wrong(f"{remark}, more than {allowed}")
    return remark


@lru_cache(maxsize=1)
def _plain_work(make: Callable[[], Problem]) -> tuple[Problem, Work]:
    """A model, and what its plain step asks for, which all verbs are held against."""
    problem = make()
    return problem, _third_step(problem, _plain)


def _third_step(problem: Problem, verb: Verb) -> Work:
    for _ in range(3):
        with count_work() as counted:
            _step(problem, verb)
    return counted


def _synchronising_calls(problem: Problem, verb: Verb) -> list[str]:
    """Where CUDA itself says that the host waited, in a step that is like those before."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            _step(problem, verb)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    said = [w for w in caught if "synchronizing" in str(w.message)]
    return [f"{w.filename}:{w.lineno}" for w in said]


def _side_stream(make: Callable[[], Problem]) -> str:
    """The same numbers from work on a stream of its own, while the default stream is busy."""
    problem, stream = make(), torch.cuda.Stream()
    want = shortcuts.norms(problem.losses(), problem.model).cpu().double()
    total = flat(shortcuts.clipped_sum(problem.losses(), problem.model, MAX_NORM))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        norms = shortcuts.norms(problem.losses(), problem.model)
        clipped = shortcuts.clipped_sum(problem.losses(), problem.model, MAX_NORM)
        stream.synchronize()
        remark = compare(norms, want, torch.float32)
        compare(flat(clipped), total, torch.float32)
    return remark


def _timed(make: Callable[[], Problem], name: str, rounds: int) -> str:
    """The median over rounds of the time beside a plain step, in turns; and the peak of memory."""
    problem, verb = _plain_work(make)[0], VERBS[name][0]
    device = problem.x.device
    ratios, ours = list[float](), list[float]()
    for done in range(-min(rounds, 3), rounds):  # the first to warm up
        usual, mine = (_seconds(problem, each, device) for each in (_plain, verb))
        if done >= 0:
            ratios.append(mine / usual)
            ours.append(mine)
    remark = f"{median(ours) * 1e3:.2f} ms, {median(ratios):.2f} of a plain step's"
    if device.type == "cuda":
        usual_bytes, own_bytes = (_peak(problem, each, device) for each in (_plain, verb))
        remark += f"; peak {in_bytes(own_bytes)}, a plain step's {in_bytes(usual_bytes)}"
    return remark


def _seconds(problem: Problem, verb: Verb, device: torch.device) -> float:
    _synchronise(device)
    start = time.perf_counter()
    _step(problem, verb)
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    """Wait for all work, where a device has a way to say so."""
    wait = getattr(torch.get_device_module(device), "synchronize", None)
    if wait is not None:
        wait()


def _peak(problem: Problem, verb: Verb, device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    _step(problem, verb)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Without TF32, which keeps ten bits of float32's: what is compared would differ by its rounding."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
