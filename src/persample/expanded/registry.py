"""Which functions have a rule, and of which kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .samples import Samples

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
Place = Callable[[Arguments, Any, Samples], None]


@dataclass(frozen=True, slots=True)
class Shipped:
    """A function whose gradients the graph engine knows; what is left to say is where its samples lie.

    ``place(arguments, result, samples)`` tells it for a function recorded alone, or raises; without it the samples are
    followed from the data to the results by the engine. ``inside`` tells it in a recorded module, if it can be known.
    """

    place: Place | None = None
    dim: int | None = None  # of the batch, where the function leaves no choice
    inside: Place | None = None


HANDLED: dict[Callable[..., Any], Shipped | type[torch.autograd.Function]] = {}


def enter(function: Callable[..., Any], rule: Shipped | type[torch.autograd.Function]) -> None:
    """Give a function its rule, once."""
    if not callable(function):
        raise RuntimeError(f"a rule is registered for a torch function, not for a {type(function).__name__}")
    if function in HANDLED:
        raise RuntimeError(f"{name_of(function)} already has a rule for expanded weights")
    HANDLED[function] = rule


def name_of(function: Callable[..., Any]) -> str:
    """A function as users know it."""
    name = getattr(function, "__name__", repr(function))
    owner = getattr(function, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name == "__get__" else str(name)
