"""What every method is turned into before it is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .workloads import Task

MAX_NORM = 1.0  # of every clipped sum


def nothing() -> None:
    """Nothing to put away."""


@dataclass(frozen=True)
class Contender:
    """A step in two halves, so that what the forward pass keeps can be told from what follows."""

    forward: Callable[[], Any]
    after: Callable[[Any], Any]  # from what the forward pass gave to the result
    clear: Callable[[], None] = nothing  # drops what the step has left on the parameters

    def step(self) -> Any:
        """The result, which ``clear`` does not touch."""
        result = self.after(self.forward())
        self.clear()
        return result


def from_losses(task: Task, after: Callable[[Tensor], Any]) -> Contender:
    """For what needs no more than the losses of the model as it is."""
    return Contender(task.losses, after)
