"""What a method must give: samples one by one, as batches of one, through ordinary backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .contender import MAX_NORM
from .workloads import Task

TOLERANCE = 0.05  # a batch of one rounds otherwise, which flips ReLUs here and there; mistakes are larger


class WrongResult(Exception):
    """A contender that is not worth timing."""


def check(task: Task, kind: str, found: Any) -> float:
    """The largest relative error of a parameter, or of the norms; raises if it is too large."""
    error, where = _COMPARE[kind](task, found)
    if not error <= TOLERANCE:  # NaN is wrong, too
        raise WrongResult(f"relative error {error:.1e} in {where}")
    return error


def rows(task: Task) -> Iterator[dict[str, Tensor]]:
    """Each sample's gradient."""
    params = task.params()
    for i in range(len(task.inputs[0])):
        losses = task.losses_fn(task.model, *(part[i : i + 1] for part in task.inputs))
        yield dict(zip(params, torch.autograd.grad(losses.sum(), list(params.values())), strict=True))


def _norm(row: Mapping[str, Tensor]) -> Tensor:
    squares = [g.double().square().sum() for g in row.values()]
    return torch.stack(squares).sum().sqrt()


def _gradients(task: Task, found: Mapping[str, Tensor]) -> tuple[float, str]:
    difference, size = dict.fromkeys(task.params(), 0.0), dict.fromkeys(task.params(), 0.0)
    for i, row in enumerate(rows(task)):
        for name, want in row.items():
            difference[name] += float((found[name][i] - want).square().sum())
            size[name] += float(want.square().sum())
    return _worst({name: (difference[name] ** 0.5, size[name] ** 0.5) for name in size})


def _clipped(task: Task, found: Mapping[str, Tensor]) -> tuple[float, str]:
    total = {name: torch.zeros_like(p) for name, p in task.params().items()}
    for row in rows(task):
        weight = (MAX_NORM / _norm(row)).clamp(max=1.0)
        for name, want in row.items():
            total[name] += weight * want
    return _worst({name: (float((found[name] - want).norm()), float(want.norm())) for name, want in total.items()})


def _norms(task: Task, found: Tensor) -> tuple[float, str]:
    want = torch.stack([_norm(row) for row in rows(task)])
    return float(((found - want) / want).abs().max()), "the norms"


def _nothing(task: Task, found: Any) -> tuple[float, str]:
    return 0.0, "nothing"


def _worst(pairs: Mapping[str, tuple[float, float]]) -> tuple[float, str]:
    """Of (difference, size) by name; a parameter that hardly counts is compared with one that does."""
    floor = 1e-4 * max(size for _, size in pairs.values())
    errors = {name: difference / max(size, floor, 1e-30) for name, (difference, size) in pairs.items()}
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return errors[worst], worst


_COMPARE: dict[str, Callable[[Task, Any], tuple[float, str]]] = {
    "gradients": _gradients,
    "clipped sums": _clipped,
    "norms": _norms,
    "engine": _nothing,
    "plain": _nothing,
}
