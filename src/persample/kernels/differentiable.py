"""Whether results are to be differentiated again (``create_graph=True``).

Then nothing that a result is computed from may be cut off from its graph: saved tensors keep theirs, no kernel writes
into memory that is given to it, and nodes are called with gradients enabled. Whatever only decides on a way (layouts,
scales against overflow, which digits can be trusted) is cut off all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["carrying_mode", "detached_by_default", "differentiable", "grad_mode", "is_differentiable"]

P = ParamSpec("P")
R = TypeVar("R")

_differentiable: ContextVar[bool] = ContextVar("differentiable", default=False)


def is_differentiable() -> bool:
    """Are the results of the call under way to be differentiated again?"""
    return _differentiable.get()


@contextmanager
def differentiable(wanted: bool) -> Iterator[None]:
    """Inside, in this thread, results are to be differentiated again, or not."""
    token = _differentiable.set(wanted)
    try:
        if wanted:
            with torch.enable_grad():
                yield
        else:
            yield
    finally:
        _differentiable.reset(token)


def grad_mode() -> AbstractContextManager[object]:
    """The mode in which results are computed."""
    return torch.enable_grad() if is_differentiable() else torch.no_grad()


def detached_by_default(t: Tensor) -> Tensor:
    """The tensor, cut off from its graph unless results are to be differentiated."""
    return t if is_differentiable() else t.detach()


def carrying_mode(function: Callable[P, R]) -> Callable[P, R]:
    """The function, to be called by any thread as if by this one: the engine has its own for accelerators."""
    if not is_differentiable():
        return function

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with differentiable(True):
            return function(*args, **kwargs)

    return called
