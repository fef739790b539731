"""Ops of ``torch.library``: which one a node belongs to, and what PyTorch's own ones need.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/graph/test_library_ops.py`` and
``test_fused.py`` check them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._library import autograd as _library
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from .saved import function_of, is_custom

Op = OpOverload | OpOverloadPacket | CustomOpDef | str  # what stands for an op of torch.library


def qualified(op: object) -> str | None:
    """``"namespace::name"``, with the overload behind a dot if it is not the default one; None if it is no op."""
    if isinstance(op, str):
        return op.removesuffix(".default") if "::" in op else None
    if isinstance(op, CustomOpDef):
        return op._qualname
    if isinstance(op, OpOverloadPacket):
        return op._qualified_op_name
    return op.name() if isinstance(op, OpOverload) else None


def registered(name: str) -> bool:
    """Is there an op of this qualified name?"""
    return torch._C._dispatch_has_kernel(name)


@cache
def arguments(name: str) -> tuple[str, ...]:
    """The names of the arguments of an op that has no overloads."""
    namespace, op = name.split("::")
    return tuple(argument.name for argument in schema_of(getattr(getattr(torch.ops, namespace), op).default).arguments)


def schema_of(overload: Any) -> Any:
    """The arguments of an overload with their defaults, and whether it writes to them."""
    return overload._schema


def op_of(node: BackwardCFunction) -> str | None:
    """The qualified name of the op of ``torch.library`` that a Python node belongs to; None if it belongs to none.

    Its Function's name does not tell where the namespace ends, but its backward holds the op.
    """
    function = function_of(node)
    if not (function.__module__ == _library.__name__ and function.__name__.startswith("GeneratedBackwardFor_")):
        return None
    held = inspect.getclosurevars(function.backward).nonlocals  # type: ignore[attr-defined]
    if "orig_backward" in held:  # an op with lists of tensors
        held = inspect.getclosurevars(held["orig_backward"]).nonlocals
    return qualified(held.get("op"))


# An op that computes its gradients in the forward pass, and hands over their memory in its first backward.
PRECOMPUTED = "torch_nn::_linear_cross_entropy_batch_chunked"
BY_ROW = f"{PRECOMPUTED}_no_reduction"  # the op that computes logits again in its backward, a few rows at a time


def ignored_class(node: Any) -> int:
    """The target that gives no loss, for a node of `BY_ROW`."""
    return int(node._ignore_index)


def rows_at_a_time(node: Any) -> int:
    """Of how many rows a node of `BY_ROW` holds the logits at once."""
    return int(node._batch_chunk_size)


@contextmanager
def unspent(nodes: Iterable[Node]) -> Iterator[None]:
    """Let nodes of `PRECOMPUTED`, which would run once only, run any number of times."""
    run_once: list[Any] = [
        node
        for node in nodes
        if is_custom(node) and getattr(node, "allow_retain_graph", True) is False and op_of(node) == PRECOMPUTED
    ]
    for node in run_once:
        node.allow_retain_graph = True
    try:
        yield
    finally:
        for node in run_once:
            node.allow_retain_graph = False
