"""Which processes hold the same parts of a model: replicas of a shard, and of what is not sharded at all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import Ranks
from .shards import is_sharded


@dataclass(frozen=True, slots=True)
class Spread:
    """Parameters whose parts lie on the processes in the same way.

    ``parts`` has the number of the part that each process holds; ``holders`` are the processes that hold this one's,
    and ``group`` is theirs, unless there is only one.
    """

    names: tuple[str, ...]
    parts: tuple[int, ...]
    holders: tuple[int, ...]  # global ranks
    group: dist.ProcessGroup | None

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of those that hold its part."""
        return dist.get_rank() == self.holders[0]

    def differ(self, numbers: Sequence[int]) -> bool:
        """Whether processes that hold the same part have different numbers; there is one for each process."""
        return len(set(zip(self.parts, numbers, strict=True))) > len(set(self.parts))

    def from_first(self, tensor: Tensor) -> None:
        """Overwrite a tensor by that of the first process that holds the same part."""
        if self.group is not None:
            dist.broadcast(tensor, self.holders[0], self.group)


def spread(params: Mapping[str, Tensor], ranks: Ranks, device: torch.device) -> list[Spread]:
    """How parameters lie on the processes of a group: the same answer, in the same order, in all of them.

    The group must have all processes that the parameters are on. Raises ValueError in all of them if they differ in how
    they hold one.
    """
    laid_out = {name: _layout(p) for name, p in params.items()}
    mine = [_digest(laid_out), *[_number_of_part(p) for p in params.values()]]
    layouts, *parts = zip(*ranks.each(mine, device), strict=True)
    if len(set(layouts)) > 1:
        raise ValueError("the processes hold the parameters in different ways: all of them must shard the model alike")
    named: dict[tuple[int, ...], list[str]] = {}
    for name, held in zip(params, parts, strict=True):
        named.setdefault(held, []).append(name)
    meshes = {id(p.device_mesh): p.device_mesh for p in params.values() if is_sharded(p)}  # type: ignore[attr-defined]
    known = [ranks.group, *[mesh.get_group(dim) for mesh in meshes.values() for dim in range(mesh.ndim)]]
    return [_spread(tuple(names), held, ranks, known) for held, names in named.items()]


def _spread(names: tuple[str, ...], parts: tuple[int, ...], ranks: Ranks, known: Sequence[dist.ProcessGroup]) -> Spread:
    every = zip(dist.get_process_group_ranks(ranks.group), parts, strict=True)
    holders = tuple(process for process, part in every if part == parts[ranks.rank])
    return Spread(names, parts, holders, None if len(holders) == 1 else group_of(holders, known))


def described(params: Mapping[str, Tensor]) -> str:
    """How parameters lie on the processes, in words to compare by; nothing where all are sharded by rows, once each."""
    if all(is_sharded(p) and str(p.placements) == "(Shard(dim=0),)" for p in params.values()):  # type: ignore[attr-defined]
        return ""
    return f", {_digest({name: _layout(p) for name, p in params.items()})}"


def _layout(p: Any) -> str:
    return f"{tuple(p.shape)}{(p.device_mesh.shape, p.placements) if is_sharded(p) else ''}"


def _digest(laid_out: Mapping[str, str]) -> int:
    return int.from_bytes(hashlib.sha256(repr(laid_out).encode()).digest()[:7], "little")


def _dims_with_parts(p: Any) -> list[int]:
    """The dims of a mesh along which processes hold different parts."""
    if not is_sharded(p):
        return []
    if any(placement.is_partial() for placement in p.placements):
        raise ValueError(f"a parameter with the placements {p.placements} is no whole number of parts")
    return [dim for dim, placement in enumerate(p.placements) if not placement.is_replicate()]


def _number_of_part(p: Any) -> int:
    """The number of this process's part: its place along the dims of the mesh that have different ones."""
    number = 0
    for dim in _dims_with_parts(p):
        number = number * p.device_mesh.size(dim) + p.device_mesh.get_local_rank(dim)
    return number


def group_of(processes: Sequence[int], known: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The group of these processes, by their global ranks: one that is known, or a new one that all of them make."""
    for group in known:
        if set(dist.get_process_group_ranks(group)) == set(processes):
            return group
    made = dist.new_group(list(processes), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
