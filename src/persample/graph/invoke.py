"""Calling one graph node by hand, outside of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .layout import Shape
from .saved import in_backward, in_checkpoint, in_own_task, is_custom, metadata, scratch_restored
from .tape import Slot


def is_opaque(node: Node) -> bool:
    """A custom ``autograd.Function``, in Python or C++, or a compiled region: its backward may be anything."""
    found = _OPAQUE.get(type(node))
    if found is None:
        found = _OPAQUE[type(node)] = is_custom(node) or "CppNode" in node.name()
    return found


_OPAQUE: dict[type, bool] = {}


def is_compiled(node: Node) -> bool:
    """A region made by ``torch.compile``: opaque, but linear."""
    return type(node).__name__ == "CompiledFunctionBackward"


def call(node: Node, cotangents: Sequence[Tensor | None], edges: Sequence[Slot | None]) -> list[Tensor | None]:
    """A node's outputs for these cotangents, one per edge, not yet summed over broadcast dims.

    Inside a backward, the engine's own task would prune outputs that it does not need; and a checkpointed node may be
    unpacked once per task only. Such calls get a task of their own.
    """
    if is_compiled(node):
        return _call_compiled(node, cotangents, edges)
    if not (in_backward() or in_checkpoint(node)):
        return _call(node, cotangents, edges)
    outputs: list[list[Tensor | None]] = []
    in_own_task(lambda: outputs.append(_call(node, cotangents, edges)))
    return outputs[0]


def _call_compiled(
    node: Node, cotangents: Sequence[Tensor | None], edges: Sequence[Slot | None]
) -> list[Tensor | None]:
    outputs: list[Tensor | None] = []

    def run() -> None:
        outputs.extend(None if t is None else t.clone() for t in _call(node, cotangents, edges))

    with scratch_restored(node):
        in_own_task(run, keep_graph=True)
    return outputs


def _call(node: Node, cotangents: Sequence[Tensor | None], edges: Sequence[Slot | None]) -> list[Tensor | None]:
    with torch.no_grad():
        if is_custom(node):
            return _call_python(node, cotangents, len(edges))
        result = node(*cotangents)  # type: ignore[operator]
    return [result] if isinstance(result, Tensor) or result is None else list(result)


def _call_python(node: Any, cotangents: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
    """A Python node returns one value per forward argument; its edges are the tensor arguments that need one."""
    filled = [
        torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None else g
        for g, m in zip(cotangents, metadata(node), strict=True)
    ]
    result = node.apply(*filled)
    values = [result] if isinstance(result, Tensor) or result is None else list(result)
    needed = [v for v, wants in zip(values, node.needs_input_grad, strict=False) if wants]
    outputs: list[Tensor | None] = [None] * count
    for k, value in zip([k for k, (n, _) in enumerate(node.next_functions) if n is not None], needed, strict=True):
        outputs[k] = value
    return outputs


def sum_to(value: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Sum over broadcast dims and take the real part, as the engine does with a node's outputs."""
    if value.is_sparse:
        value = value.to_dense()
    if tuple(value.shape) != shape:
        value = value.sum_to_size(shape)
    if value.is_complex() and not dtype.is_complex:
        value = value.real
    return value.to(dtype)
