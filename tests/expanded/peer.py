"""What a program for PyTorch's call_for_per_sample_grads and for ours is, and what the peer does with it.

Nothing here says how either works: the definition is what both are measured with.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.expanded.helpers import squares, taken, total
from tests.modes import default_dtype
from tests.reference import definition

OBSERVED = (2, 13)  # the torch on which the peer's behaviour was observed
WRONG = "gives a wrong result without an error"
FAILS = "raises"
AGREES = "is right"  # neighbours of what it gets wrong, which show where the line runs


def time_first(out: Tensor) -> Tensor:
    """Losses (B,) of an output (T, B, ...)."""
    return squares(out, 1)


@dataclass
class Program:
    """A module, what it is called with, and losses (B,) made of its output."""

    module: nn.Module
    args: tuple[Any, ...]
    losses: Callable[[Any], Tensor] = squares
    options: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], Any] | None = None  # a context for the forward

    def forward(self, call: Callable[..., Any]) -> Tensor:
        """The losses, with `call` in the place of the module."""
        torch.manual_seed(0)
        if self.around is None:
            return self.losses(call(*self.args))
        with self.around():
            out = call(*self.args)
        return self.losses(out)

    def want(self) -> dict[str, Tensor]:
        """The definition, on the plain module and the batch as it was run."""
        return definition(self.forward(self.module), self.module)

    def got(self, call_for: Callable[..., Any], reduction: str = "sum") -> dict[str, Tensor]:
        """The grad_sample that `call_for` (the peer's or ours) leaves behind after the user's backward."""
        losses = self.forward(call_for(self.module, loss_reduction=reduction, **self.options))
        total(losses, reduction).backward()
        return taken(self.module)


@dataclass(frozen=True)
class Case:
    """One program and what the peer does with it."""

    name: str
    make: Callable[[int], Program]
    peer: str
    message: str  # part of the peer's error
    batches: tuple[int, ...]
    dtype: torch.dtype
    rtol: float
    slow: bool  # for ours: an op that no rule can know
    refused: tuple[int, ...]  # for ours: the batch sizes at which positions cannot be told from samples

    def build(self, B: int) -> Program:
        """The program at one batch size: same numbers every time."""
        with default_dtype(self.dtype):
            torch.manual_seed(zlib.crc32(self.name.encode()))
            return self.make(B)


def on(module: nn.Module, *args: Any, losses: Callable[[Any], Tensor] = squares, around: Any = None) -> Program:
    """A module called with these arguments, the samples in dim 0."""
    return Program(module, args, losses, around=around)


def second(module: nn.Module, *args: Any) -> Program:
    """A module called with these arguments, the samples in dim 1."""
    return Program(module, args, time_first, {"batch_first": False})


def ends_second(module: nn.Module, *args: Any) -> Program:
    """A module called with the samples in dim 0, which returns them in dim 1."""
    return Program(module, args, time_first)
