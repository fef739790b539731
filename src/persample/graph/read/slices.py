"""What was written into a part of a tensor: where the part lies, of a node that does not say so.

`CopySlices` hides the op that changed a view, and where the view lies. Its backward is run on tensors that stand for
others, and every op that it calls is looked at before anything is computed: if it does what the backward of a copy
does, and nothing else, the part is known, whatever the data are.

The names of ops are PyTorch's own. They hold for torch 2.13 to 2.15; ``tests/graph/test_slices.py`` checks them. Under
other names, a copy is not recognised, and the data are asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from ...numberless import with_numbers
from ..layout import Shape
from .notes import ask
from .saved import in_backward, in_checkpoint, metadata


@dataclass(frozen=True, slots=True)
class Copied:
    """The part of a tensor that was overwritten: as_strided of a tensor with some strides."""

    strides: Shape  # of the tensor
    size: Shape
    stride: Shape
    offset: int


def copied(node: Node) -> Copied | None:
    """What was copied where; None if anything else was done, or nobody can tell."""
    found = ask(node, _copied)
    return None if found is None else Copied(*found)


@with_numbers
def _copied(node: Node) -> tuple[Any, ...] | None:
    if in_checkpoint(node) or in_backward():
        return None
    (meta,) = metadata(node)
    edges = [below for below, _ in node.next_functions]
    if len(edges) != 2 or edges[1] is None or meta.is_nested_tensor:
        return None
    watched, g = _Watched(), _standing_for(meta.shape, meta.dtype, meta.device)
    try:
        with torch.no_grad(), watched:
            outputs = node(g)  # type: ignore[operator]
    except _OtherOp:
        return None
    return _place(watched.calls, outputs, onward=edges[0] is not None)


def _standing_for(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((), dtype=dtype, device=device).expand(tuple(shape))


class _OtherOp(Exception):
    """An op was called that the backward of a copy does not call."""


_Call = tuple[str, Sequence[Any], Tensor]  # an op, what it was given, and what it returned


class _Watched(TorchDispatchMode):
    """Writes down the ops that are called, and computes nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No compiler need be kept away from what is called here: to do so, PyTorch would import it first."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        name, given = str(func), kwargs or {}
        if name not in _OPS:
            raise _OtherOp
        first: Tensor = args[0]
        size = args[1] if name in (_NEW, _PART) else first.shape
        dtype, device = given.get("dtype") or first.dtype, given.get("device") or first.device
        result = first if name == _COPY else _standing_for(size, dtype, device)
        self.calls.append((name, args, result))
        return result


_NEW, _COPY, _PART, _CLONE = (
    "aten.new_empty_strided.default",
    "aten.copy_.default",
    "aten.as_strided.default",
    "aten.clone.default",
)
_ZEROS, _CONVERT = "aten.zeros_like.default", "aten._to_copy.default"
_OPS = {_NEW, _COPY, _PART, _CLONE, _ZEROS, _CONVERT}


def _place(calls: Sequence[_Call], outputs: Sequence[Tensor | None], *, onward: bool) -> tuple[Any, ...] | None:
    """Where the part lies, if it is cloned, and then overwritten by zeros where the gradient goes ``onward``."""
    if [name for name, _, _ in calls[:4]] != [_NEW, _COPY, _PART, _CLONE]:
        return None
    (_, (g, _, strides), whole), (_, copied, _), (_, part_of, part), (_, cloned, clone), *others = calls
    if copied[0] is not whole or copied[1] is not g or part_of[0] is not whole or cloned[0] is not part:
        return None
    source, zeros, overwritten = clone, None, False
    for name, args, result in others:
        if name == _ZEROS and zeros is None:
            zeros = result
        elif name == _CONVERT and args[0] is clone and source is clone:
            source = result
        elif name == _COPY and not overwritten and args[0] is part and args[1] is zeros:
            overwritten = True
        else:
            return None
    if outputs[1] is not source or (onward and not (overwritten and outputs[0] is whole)):
        return None
    return tuple(strides), tuple(part_of[1]), tuple(part_of[2]), int(part_of[3])
