"""What is compared: everything that can be done with the losses of a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

import persample as ps
from persample.graph.entry import capture
from persample.graph.plan import plan
from persample.graph.roots import Roots

from .workloads import Task

After = Callable[[Tensor], object]  # what follows the forward pass


@dataclass(frozen=True)
class Method:
    """A contender."""

    name: str
    title: str
    prepare: Callable[[Task], After]
    with_forward: bool = True  # is the forward pass part of its time?
    writes_out: bool = False  # gigabytes of gradients leave caches and pages cold for whoever comes next


def _plain(task: Task) -> After:
    def after(losses: Tensor) -> None:
        losses.sum().backward()
        task.model.zero_grad(set_to_none=True)

    return after


def _walk(task: Task) -> After:
    params = list(task.params().values())
    return lambda losses: plan(Roots.of_losses(losses), params)


def _capture(task: Task) -> After:
    params = task.params()
    return lambda losses: capture(losses, params, retain_graph=False)


def _grad(task: Task) -> After:
    return lambda losses: ps.grad(losses, task.model)


def _grad_out(task: Task) -> After:
    buffers = ps.grad(task.losses(), task.model)
    return lambda losses: ps.grad(losses, task.model, out=buffers)


def _norms(task: Task) -> After:
    return lambda losses: ps.norms(losses, task.model)


def _clipped_sum(task: Task) -> After:
    return lambda losses: ps.clipped_sum(losses, task.model, max_norm=1.0)


METHODS = {
    m.name: m
    for m in [
        Method("plain", "forward and losses.sum().backward()", _plain),
        Method("walk", "walk and layouts, without forward", _walk, with_forward=False),
        Method("capture", "forward and factors, nothing stacked", _capture),
        Method("norms", "forward and ps.norms", _norms),
        Method("clipped_sum", "forward and ps.clipped_sum", _clipped_sum),
        Method("grad", "forward and ps.grad into new buffers", _grad, writes_out=True),
        Method("grad_out", "forward and ps.grad(out=)", _grad_out, writes_out=True),
    ]
}
