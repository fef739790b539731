"""What is timed and what its memory is taken of, each as a function of a workload's task."""

from __future__ import annotations

from collections.abc import Callable

import persample as ps
from persample.graph.capture import capture

from .workloads import Task

Step = Callable[[], object]


def plain(task: Task) -> Step:
    """An ordinary training step without the optimizer: what all others are compared with."""

    def step() -> None:
        task.model.zero_grad(set_to_none=True)
        task.losses().sum().backward()

    return step


def captured(task: Task) -> Step:
    """Forward, and every parameter's factor; nothing is stacked."""
    params = task.params()
    return lambda: capture(task.losses(), params, retain_graph=False)


def fresh(task: Task) -> Step:
    """Forward, and per-sample gradients in new buffers."""
    return lambda: ps.grad(task.losses(), task.model)


def reused(task: Task) -> Step:
    """Forward, and per-sample gradients in the buffers of an earlier call."""
    buffers = ps.grad(task.losses(), task.model)
    return lambda: ps.grad(task.losses(), task.model, out=buffers)


STEPS: dict[str, Callable[[Task], Step]] = {"plain": plain, "capture": captured, "grad": fresh, "grad_out": reused}
