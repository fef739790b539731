"""Reading what autograd nodes and leaves hold: saved tensors, hooks, versions, and the backward under way.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/graph/test_saved.py`` checks them
and the behaviours that are relied on.

Non-reentrant checkpointing lets every saved tensor be unpacked once per backward, and recomputes a region once per
backward that unpacks anything of it. A read during the backward would use up the one that the node itself needs;
`unpacked_often` lifts that limit, so that reading costs no recomputation beyond the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import _Holder

from ...distributed.tensor_parallel import mesh_of, there_are_processes, whole

# Modules of this folder ask about nodes here, whatever they want to know.
from ...kernels.differentiable import carrying_mode, detached_by_default, is_differentiable
from ...numberless import has_numbers, storage_of
from ...python_nodes import function_of as function_of
from ...python_nodes import is_custom as is_custom
from ...python_nodes import is_torchs as is_torchs
from .notes import ask, by_data, note

_UNSIGNED = 1 << 64


def read(node: Node, name: str) -> Any:
    """What a node has saved under a name: written down, as a remembered plan relies on it."""
    held = getattr(node, f"_saved_{name}")
    note(node, f"_saved_{name}", held)
    return held


def signed(value: int) -> int:
    """Negative integers (a missing padding_idx, dim=-1) are shown as unsigned 64-bit numbers."""
    return value - _UNSIGNED if value >= 1 << 63 else value


# Shape, dtype and device of each of a node's cotangents.
metadata: Callable[[Node], Sequence[Any]] = attrgetter("_input_metadata")


def in_backward() -> bool:
    """Is this thread inside a backward?"""
    return torch._C._current_graph_task_id() != -1


def born(node: Node) -> int:
    """A number that is larger for nodes that this thread has recorded later."""
    return int(node._sequence_nr())


def will_run(node: Node) -> bool:
    """Will the backward under way come to this node?"""
    return bool(torch._C._will_engine_execute_node(node))


def has_hooks(t: Tensor) -> bool:
    """Would somebody change or see this leaf's gradient (register_hook)?"""
    return bool(t._backward_hooks)


def has_late_hooks(t: Tensor) -> bool:
    """Does somebody wait for this leaf's gradient to have been added (register_post_accumulate_grad_hook)?"""
    return bool(getattr(t, "_post_accumulate_grad_hooks", None))


def late_hooks(t: Tensor) -> list[Callable[[Tensor], None]]:
    """What is to be called when this leaf's gradient has been added."""
    return list((getattr(t, "_post_accumulate_grad_hooks", None) or {}).values())


def version(t: Tensor) -> int:
    """How often a tensor, or one that shares its memory, has been changed in place; inference mode does not count."""
    return 0 if t.is_inference() else int(t._version)


def viewed(t: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, or None."""
    return t._base


def has_memory(t: Tensor) -> bool:
    """Is this a tensor with numbers of its own, and no wrapper of others, sparse one or zero that was never written?"""
    return type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not t._is_zerotensor()


def memory(t: Tensor) -> int:
    """Where a tensor's numbers lie, or would: equal for views of one another. A wrapper of others stands for itself."""
    if not has_numbers(t):
        return storage_of(t)
    return t.untyped_storage().data_ptr() if has_memory(t) else id(t)


def keeps_graph() -> bool:
    """Was the backward under way asked to keep its graph?"""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def has(node: Node, name: str) -> bool:
    """Is something saved under this name by nodes of this kind? The node is not asked: a checkpoint would recompute."""
    return hasattr(type(node), f"_saved_{name}")


def tensor(node: Node, name: str) -> Tensor | None:
    """A saved tensor; None if it was not needed. Sparse data come written out, DTensors gathered.

    It is cut off from its graph, unless results are to be differentiated again.
    """
    held = read(node, name)
    return None if held is None else _dense(detached_by_default(held))


def tensors(node: Node, name: str) -> tuple[Tensor, ...]:
    """A saved list of tensors, as `tensor` gives them."""
    return tuple([_dense(detached_by_default(held)) for held in read(node, name)])


def _dense(t: Tensor) -> Tensor:
    t = whole(t)
    return t if t.layout == torch.strided else t.to_dense()


# Saved under these names are a forward op's operands; under others, its results and options.
_OPERANDS = """
self other input mat1 mat2 batch1 batch2 mat vec i1 i3 query key value tensor1 tensor2 x1 x2 src
source index indices mask
"""


def constants(node: Node) -> list[Tensor]:
    """Saved operands that carry no gradient: data, as opposed to weights and what was computed from them."""
    by_data()
    operands: list[object]
    if is_custom(node):
        operands = list(node.saved_tensors)
    else:
        saved = [getattr(node, f"_saved_{name}", None) for name in _OPERANDS.split()]
        operands = [t for s in saved for t in (s if isinstance(s, tuple) else (s,))]
    return [whole(t) for t in operands if isinstance(t, Tensor) and not t.requires_grad]


def mesh(node: Node) -> Any:
    """The mesh of the DTensors that a node has saved; None if there are none."""
    return mesh_of(_saved(node)) if there_are_processes() and not is_custom(node) else None


def _saved(node: Node) -> Iterator[object]:
    for name in _raw_names(node):
        held = getattr(node, name.replace("_raw_saved_", "_saved_"), None)
        yield from held if isinstance(held, tuple) else (held,)


def holds_sparse(node: Node) -> bool:
    """Is one of the saved operands a sparse tensor, with which vmap does not work?"""
    return any(t.layout != torch.strided for t in constants(node))


def _holders(node: Node) -> dict[str, list[Any]]:
    """Saved tensors of a node that a checkpoint will recompute: name -> its holder, or those of a list of tensors."""
    by_name = {}
    for attribute in _raw_names(node):
        raw = getattr(node, attribute)
        packed = [getattr(one, "data", None) for one in (raw if isinstance(raw, tuple) else (raw,))]
        holders = [one for one in packed if hasattr(one, "handles")]
        if holders:
            by_name[attribute.removeprefix("_raw_saved_")] = holders
    return by_name


def _raw_names(node: Node) -> tuple[str, ...]:
    """The saved tensors that a node has; those of a custom Function are one list."""
    return ("_raw_saved_tensors",) if is_custom(node) else _raw_names_of(type(node))


@lru_cache(maxsize=4096)
def _raw_names_of(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def in_checkpoint(node: Node) -> bool:
    """Does this node lie in a region of non-reentrant checkpointing?"""
    return bool(ask(node, _in_checkpoint))


def _in_checkpoint(node: Node) -> bool:
    """All saved tensors of such a node are held back, but for numbers: one tensor that is there tells."""
    for attribute in _raw_names(node):
        raw = getattr(node, attribute)
        for one in raw if isinstance(raw, tuple) else (raw,):
            packed = getattr(one, "data", None)
            if isinstance(packed, Tensor):
                if packed.ndim:
                    return False
            elif hasattr(packed, "handles"):
                return True
    return False


class _Task(torch.autograd.Function):
    """Runs a function inside a backward of its own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, fn: Callable[[], None]) -> Tensor:
        ctx.fn = fn
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        ctx.fn()
        return grads[0], None


def in_own_task(fn: Callable[[], None], *, keep_graph: bool = False) -> None:
    """Call ``fn`` inside a backward that is separate from the one under way.

    It is a plain ``backward()``, which prunes nothing: nodes called by ``fn`` compute all their outputs.
    """

    def run() -> None:
        task = torch._C._current_graph_task_id()
        _own_tasks.add(task)
        try:
            with torch.set_grad_enabled(is_differentiable()):
                fn()
        finally:
            _own_tasks.discard(task)

    with torch.enable_grad():
        result: Tensor = _Task.apply(torch.zeros((), device="cpu", requires_grad=True), carrying_mode(run))  # type: ignore[no-untyped-call]
    result.backward(retain_graph=keep_graph or is_differentiable())


_own_tasks: set[int] = set()


def in_plain_task() -> bool:
    """Is this code called by `in_own_task`, where nothing is pruned?"""
    return torch._C._current_graph_task_id() in _own_tasks


class _Kept(dict[int, Any]):
    """A checkpoint's handles to recomputed tensors, which it strikes out by None after one use: not from this dict."""

    def __setitem__(self, task: int, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(task, handle)


@contextmanager
def unpacked_often(node: Node) -> Iterator[None]:
    """Let a checkpointed node's saved tensors be unpacked any number of times, and once more by the engine after."""
    holders = [holder for held in _holders(node).values() for holder in held]
    task = torch._C._current_graph_task_id()
    before = [set(holder.handles) for holder in holders]
    for holder in holders:
        holder.handles = _Kept(holder.handles)
    try:
        yield
    finally:
        for holder, tasks in zip(holders, before, strict=True):
            holder.handles = {t: h for t, h in holder.handles.items() if t in tasks or t == task}


def read_ahead(node: Node) -> dict[str, Tensor]:
    """All saved tensors of a checkpointed node, while the engine is still to come to it."""
    with unpacked_often(node):
        read = {name: getattr(node, f"_saved_{name}", None) for name in _holders(node)}
    return {name: _dense(detached_by_default(value)) for name, value in read.items() if isinstance(value, Tensor)}


def read_last(node: Node) -> dict[str, Tensor]:
    """All saved tensors of a checkpointed node that the engine will not come to, which are let go.

    If some are lists of tensors, which are read one by one, none is returned here and none let go.
    """
    tensors = read_ahead(node)
    if len(tensors) != len(_holders(node)):
        return {}
    let_go(node)
    return tensors


if not (hasattr(torch._C._autograd.SavedTensor, "data") and hasattr(_Holder(), "handles")):
    # Where a region begins would go unnoticed, and it would be read as if there were none.
    raise ImportError(
        f"torch {torch.__version__} does not show which saved tensors a checkpoint holds back, as 2.13 to 2.15 do: "
        f"install one of these"
    )


def is_recomputed(node: Node) -> bool:
    """Has the backward under way already recomputed the checkpointed region of this node?"""
    task = torch._C._current_graph_task_id()
    return any(holder.handles.get(task) is not None for held in _holders(node).values() for holder in held)


def let_go(node: Node) -> None:
    """Drop what was recomputed for a node that the engine will not come to."""
    task = torch._C._current_graph_task_id()
    for held in _holders(node).values():
        for holder in held:
            if task in holder.handles:
                holder.handles[task] = None
