"""Compiled steps as contenders: `ps.compile`, the plain step of ``torch.compile``, and verbs on what it compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import persample as ps

from .contender import MAX_NORM, Contender
from .workloads import Task


def _step(task: Task, reduction: ps.Reduction) -> Contender:
    """The whole step is one call, in which no forward pass can be told from what follows."""
    step = ps.compile(lambda *inputs: task.losses_fn(task.model, *inputs), task.model, reduction, verbose=False)

    def run(_: None) -> Any:
        (result,) = step(*task.inputs)
        return result

    run(None)  # builds
    if step.refused:
        raise RuntimeError(step.refused)
    return Contender(lambda: None, run)


def norms(task: Task) -> Contender:
    return _step(task, ps.Norms())


def clipped_sum(task: Task) -> Contender:
    return _step(task, ps.ClippedSum(MAX_NORM))


def plain(task: Task) -> Contender:
    """The ordinary step of a model that ``torch.compile`` compiled."""
    model = torch.compile(task.model)

    def gradient(losses: Tensor) -> Mapping[str, Tensor | None]:
        losses.sum().backward()
        return {name: p.grad for name, p in task.params().items()}

    made = Contender(
        lambda: task.losses_fn(model, *task.inputs), gradient, lambda: task.model.zero_grad(set_to_none=True)
    )
    made.step()
    return made


def norms_of_compiled(task: Task) -> Contender:
    """``ps.norms`` of losses that a model computed which the user compiled."""
    model = torch.compile(task.model)
    made = Contender(lambda: task.losses_fn(model, *task.inputs), lambda losses: ps.norms(losses, task.model))
    made.step()
    return made
