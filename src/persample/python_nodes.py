"""Nodes of the graph that are written in Python: which ``autograd.Function`` each belongs to.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/graph/test_saved.py`` checks them.
"""

from __future__ import annotations

from typing import TypeGuard

from torch.autograd.function import BackwardCFunction, Function


def is_custom(node: object) -> TypeGuard[BackwardCFunction]:
    """A node written in Python: a custom ``autograd.Function`` or a compiled region."""
    return isinstance(node, BackwardCFunction)


def function_of(node: BackwardCFunction) -> type:
    """The ``autograd.Function`` that a Python node belongs to."""
    function: type = node._forward_cls  # type: ignore[attr-defined]
    return function


def node_type_of(function: type[Function]) -> type:
    """The type of the nodes of an ``autograd.Function``."""
    node_type: type = function._backward_cls
    return node_type


def is_torchs(node: object, *names: str) -> TypeGuard[BackwardCFunction]:
    """A node of one of PyTorch's own Functions of these names, and not of a user's that is called the same."""
    return (
        type(node).__name__.removesuffix("Backward") in names
        and is_custom(node)
        and function_of(node).__module__.startswith("torch.")
    )
