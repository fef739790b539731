"""Tensor parallel models, whose graphs hold DTensors: whole tensors for what is read of them, and what is refused.

A DTensor stands for one whole tensor, and autograd's nodes know it by its whole shape; so do the cotangents that
PyTorch's backward brings to them. Whatever is read of such a node is gathered, and all further work is that of one
process, done by every process that has a part of the model. These must have the same samples, as they have in any
tensor parallel model, and make the same calls.

Between ``to_local`` and ``from_local`` a model computes with plain tensors. If these are parts of a whole, a plain
parameter that is used there has a part of its gradient in every process: that is refused.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/distributed/test_names.py`` looks
them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node

from .._errors import UnsupportedError
from ..python_nodes import is_torchs
from .ranks import Ranks
from .shards import is_sharded

TO_LOCAL, FROM_LOCAL, REDISTRIBUTE = "_ToTorchTensor", "_FromTorchTensor", "Redistribute"
DTENSOR_FUNCTIONS = (TO_LOCAL, FROM_LOCAL, REDISTRIBUTE)


def there_are_processes() -> bool:
    """Without them there are no DTensors."""
    return dist.is_available() and dist.is_initialized()


def changes_placements(node: object) -> bool:
    """Is this one of the nodes by which DTensors come about, are placed in another way, or become plain tensors?"""
    return is_torchs(node, *DTENSOR_FUNCTIONS)


def keeps_whole(node: Node) -> bool:
    """Does such a node have the same whole tensor before and after, in every process?"""
    return is_torchs(node, REDISTRIBUTE) or _is_replicated(_placements(node))


def whole(t: Tensor) -> Tensor:
    """A tensor itself, or the whole one that a DTensor stands for: gathered, and added up where processes have terms.

    Results of communication that is under way are waited for.
    """
    if type(t) is Tensor or type(t) is nn.Parameter:
        return t
    if is_sharded(t):
        with torch.no_grad():
            t = t.full_tensor()  # type: ignore[attr-defined]
    return t.wait() if type(t).__name__ == "AsyncCollectiveTensor" else t  # type: ignore[attr-defined]


def wholes(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """`whole` of those that are there."""
    return [None if t is None else whole(t) for t in tensors]


def mesh_of(tensors: Iterable[object]) -> Any:
    """The mesh of the first DTensor among these; None if there is none."""
    return next((t.device_mesh for t in tensors if isinstance(t, Tensor) and is_sharded(t)), None)  # type: ignore[attr-defined]


def on_mesh(t: Tensor, mesh: Any) -> Tensor:
    """A plain tensor that all processes of a mesh have, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


def held_by_several(params: Mapping[str, Any], processes: Iterable[int]) -> list[str]:
    """Names of DTensors of which others among these processes, by global ranks, hold parts beside this one."""
    others = set(processes) - {dist.get_rank()}
    return [name for name, p in params.items() if is_sharded(p) and not others.isdisjoint(ranks_of(p.device_mesh))]


def ranks_of(mesh: Any) -> list[int]:
    """The processes of a mesh, by global ranks."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def check_graph(losses: Tensor, params: Mapping[str, Tensor], order: Sequence[Node]) -> None:
    """Refuse a graph with DTensors of which processes would give other answers than one process alone.

    ``order`` has all nodes of the graph, each before those that it leads to.
    """
    meshes = {id(mesh): mesh for node in order if (mesh := _mesh(node)) is not None}
    if not meshes:
        return
    _refuse_partial(params, order)
    for mesh in meshes.values():
        for group in mesh.get_all_groups():
            _check_same_losses(losses, Ranks(group))


def _mesh(node: Any) -> Any:
    if is_torchs(node, TO_LOCAL):
        return node.dtensor_spec.mesh  # type: ignore[attr-defined]
    return node.forward_input_device_mesh if is_torchs(node, FROM_LOCAL) else None  # type: ignore[attr-defined]


def _placements(node: Any) -> Sequence[Any]:
    """The placements of the DTensor from which, or to which, such a node leads."""
    if is_torchs(node, TO_LOCAL):
        return (*node.dtensor_spec.placements, *(node.grad_placements or ()))  # type: ignore[attr-defined]
    return (*node.forward_input_placements, *(node.grad_placements or ()))


def _is_replicated(placements: Sequence[Any]) -> bool:
    return all(placement.is_replicate() for placement in placements)


def _refuse_partial(params: Mapping[str, Tensor], order: Sequence[Any]) -> None:
    """Refuse plain parameters that are used together with parts of tensors, as those of other processes differ."""
    names = {id(p): name for name, p in params.items() if not is_sharded(p)}
    apart = _computed_from_parts(order)
    wrong = []
    for node in order:  # from losses to leaves: what is used together with parts
        if is_torchs(node, TO_LOCAL, REDISTRIBUTE):
            continue
        if is_torchs(node, FROM_LOCAL):
            mixed = not _is_replicated(_placements(node))
        else:
            mixed = node in apart
        if not mixed:
            continue
        for child, _ in node.next_functions:
            if child is not None:
                apart.add(child)
                if type(child).__name__ == "AccumulateGrad" and id(child.variable) in names:
                    wrong.append(names[id(child.variable)])
    if wrong:
        raise UnsupportedError(
            f"parameters {list(dict.fromkeys(wrong))} are no DTensors, and are used together with parts of tensors "
            f"(to_local of a sharded DTensor): every process has a part of their gradients, which is not that of one "
            f"process alone. Give them to parallelize_module, or use them where activations are whole"
        )


def _computed_from_parts(order: Sequence[Node]) -> set[Node]:
    """Nodes whose results are plain tensors that differ from process to process."""
    found: set[Node] = set()
    for node in reversed(order):
        if is_torchs(node, TO_LOCAL):
            is_part = not _is_replicated(_placements(node))
        elif is_torchs(node, FROM_LOCAL, REDISTRIBUTE):
            is_part = False
        else:
            is_part = any(child in found for child, _ in node.next_functions)
        if is_part:
            found.add(node)
    return found


def _check_same_losses(losses: Tensor, ranks: Ranks) -> None:
    """Processes that have parts of a model must have the same samples: parts of several would be put together."""
    counts = ranks.each([len(losses), losses.numel()], losses.device)
    same = all(count == counts[0] for count in counts)
    if same and losses.numel():
        every = torch.zeros(ranks.size, losses.numel(), dtype=losses.dtype, device=losses.device)
        every[ranks.rank] = losses.detach().flatten()
        dist.all_reduce(every, group=ranks.group)
        same = torch.allclose(every, every[:1], rtol=1e-3, atol=1e-6, equal_nan=True)
    if not same:
        raise UnsupportedError(
            f"the processes of a tensor parallel model have different losses ({counts} of them, or of other values): "
            f"give all processes of the mesh's dim the same samples, and use dims of their own for data parallelism"
        )
