"""Sums over the processes of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.norms import wide


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that add up what each has of its own samples.

    All of them must ask for the same sums in the same order, whatever their samples are: with none at all, too.
    """

    group: dist.ProcessGroup

    @classmethod
    def of(cls, group: object) -> Ranks | None:
        """The ranks of ``process_group=``; None if nothing is to be communicated."""
        if group is None:
            return None
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a torch.distributed.ProcessGroup that this process is in, "
                f"such as torch.distributed.group.WORLD, not {type(group).__name__}"
            )
        return cls(group)

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of processes in the group."""
        return dist.get_world_size(self.group)

    def first(self, value: bytes, device: torch.device) -> bytes:
        """The first rank's value, on all of them."""
        size = torch.tensor([len(value)], dtype=torch.int64, device=device)
        dist.broadcast(size, group=self.group, group_src=0)
        line = torch.zeros(int(size), dtype=torch.uint8, device=device)
        if self.rank == 0:
            line.copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else line)
        dist.broadcast(line, group=self.group, group_src=0)
        return bytes(line.tolist())

    def each(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Every rank's numbers, on all of them."""
        empty = [0] * len(numbers)
        lines = [list(numbers) if rank == self.rank else empty for rank in range(self.size)]
        of_all = self.count([n for line in lines for n in line], device)
        return [of_all[place : place + len(numbers)] for place in range(0, len(of_all), len(numbers))]

    def count(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """The sum over ranks of each number."""
        total = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.all_reduce(total, group=self.group)
        return [int(n) for n in total.tolist()]

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum over ranks of each tensor, in float32 or wider: one all-reduce for all of them.

        More than one only if they differ in dtype or device.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, t in tensors.items():
            kinds.setdefault((wide(t.dtype), t.device), []).append(name)
        totals: dict[str, Tensor] = {}
        for (dtype, _), names in kinds.items():
            line = torch.cat([tensors[name].detach().reshape(-1).to(dtype) for name in names])
            dist.all_reduce(line, group=self.group)
            parts = line.split([tensors[name].numel() for name in names])
            totals.update({name: part.view(tensors[name].shape) for name, part in zip(names, parts, strict=True)})
        return {name: totals[name] for name in tensors}
