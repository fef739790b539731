"""Calling one graph node by hand, outside of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointError

from ..._errors import UnsupportedError
from ...distributed.tensor_parallel import on_mesh, wholes
from ...kernels.differentiable import grad_mode
from ...kernels.library import materialized
from ..layout import Shape
from .compiled import is_compiled, scratch_restored
from .library import unspent
from .nodes import is_opaque, op_name
from .saved import (
    in_backward,
    in_checkpoint,
    in_own_task,
    in_plain_task,
    is_custom,
    mesh,
    metadata,
    unpacked_often,
)

T = TypeVar("T")


Cotangents = Sequence[Tensor | None]
Outputs = list[Tensor | None]


def call(node: Node, cotangents: Cotangents, edges: Sequence[object]) -> Outputs:
    """A node's outputs for these cotangents, one per edge, not yet summed over broadcast dims."""
    return call_each(node, [cotangents], edges, list)[0]


def call_each(node: Node, rows: Iterable[Cotangents], edges: Sequence[object], take: Callable[[Outputs], T]) -> list[T]:
    """``take`` of a node's outputs, for one row of cotangents after another.

    Inside a backward, the engine's own task would prune outputs that it does not need; and a checkpointed node is
    recomputed once per task. So such calls get a task of their own, one for all rows.
    """
    results: list[T] = []

    def run() -> None:
        results.extend(take(_call(node, row, edges)) for row in rows)

    if is_compiled(node):
        _call_compiled(node, rows, edges, lambda outputs: results.append(take(outputs)))
    else:
        with unpacked_often(node), unspent([node]):
            if in_plain_task() or not (in_backward() or in_checkpoint(node)):
                run()
            else:
                in_own_task(run)
    return results


def _call_compiled(
    node: Node, rows: Iterable[Cotangents], edges: Sequence[object], give: Callable[[Outputs], None]
) -> None:
    for row in rows:

        def run(row: Cotangents = row) -> None:
            give([None if t is None else t.clone() for t in _call(node, row, edges)])

        with scratch_restored(node):
            in_own_task(run, keep_graph=True)


def _call(node: Node, cotangents: Cotangents, edges: Sequence[object]) -> Outputs:
    with grad_mode():
        if is_custom(node):
            return _call_python(node, cotangents, len(edges))
        try:
            given = [None if g is None else _as_given(node, g) for g in cotangents]
            result = node(*given) if (found := mesh(node)) is None else _call_on(found, node, given)  # type: ignore[operator]
        except CheckpointError as error:
            if type(node).__name__ != "CopySlices":  # which hides the op that changed a view, and what that has saved
                raise
            raise UnsupportedError(
                "a checkpointed function changes a view of weights in place (nn.ReLU(inplace=True) after a reshape), "
                "which can be run backwards once only: use the op that returns a new tensor, or no checkpoint"
            ) from error
        except RuntimeError as error:
            if type(error) is not RuntimeError or any(words in str(error) for words in _TOLD_BY_PYTORCH):
                raise
            raise UnsupportedError(
                f"the backward of {op_name(node)} (results of shape {[tuple(m.shape) for m in metadata(node)]}) fails "
                f"when it is called by itself, for the gradients of all its operands. PyTorch says: {error}"
            ) from error
    return [result] if isinstance(result, Tensor) or result is None else list(result)


def _call_on(mesh: Any, node: Any, cotangents: Cotangents) -> Outputs:
    """A node that has saved DTensors takes no others."""
    result = node(*[None if g is None else on_mesh(g, mesh) for g in cotangents])
    return wholes([result] if isinstance(result, Tensor) or result is None else result)


# A freed graph, and a saved tensor that was changed, are for the user to mend, who knows PyTorch's own words for them.
_TOLD_BY_PYTORCH = ("second time", "modified by an inplace operation")


def _as_given(node: Node, g: Tensor) -> Tensor:
    return _at_the_start(g).clone() if is_opaque(node) else _at_the_start(g)  # a custom Function may write to it


def _at_the_start(g: Tensor) -> Tensor:
    """A cotangent as plain numbers, in memory that begins with them.

    Some backwards refuse unusual strides, or get them wrong (batch norm, pooling in three dims); that of
    as_strided_scatter reads from the start of the memory.
    """
    if g.layout != torch.strided:
        return g
    g = materialized(g)
    return g.clone() if g.storage_offset() else g


def _call_python(node: Any, cotangents: Cotangents, count: int) -> Outputs:
    """A Python node returns one value per forward argument; its edges are the tensor arguments that need one.

    It may write to its cotangents, which are copied, as rows of others may lie in the same memory.
    """
    filled = [
        torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None else g.clone()
        for g, m in zip(cotangents, metadata(node), strict=True)
    ]
    result = node.apply(*filled)
    values = [result] if isinstance(result, Tensor) or result is None else list(result)
    needed = [v for v, wants in zip(values, node.needs_input_grad, strict=False) if wants]
    outputs: Outputs = [None] * count
    for k, value in zip([k for k, (n, _) in enumerate(node.next_functions) if n is not None], needed, strict=True):
        outputs[k] = value
    return outputs


def sum_to(value: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Sum over broadcast dims and take the real part, as the engine does with a node's outputs."""
    if value.layout != torch.strided:
        value = value.to_dense()
    if tuple(value.shape) != shape:
        value = value.sum_to_size(shape)
    if value.is_complex() and not dtype.is_complex:
        value = value.real
    return value.to(dtype)
