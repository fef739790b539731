"""The processes that build an index together; one process alone is a team, too."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import Ranks


class Team:
    """Ranks, connected by gloo if there are several: chunks and sums are on the CPU."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        if not dist.is_available():
            return
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
            dist.init_process_group("gloo")
            atexit.register(_leave)
        if dist.is_initialized() and dist.get_world_size() > 1:
            group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
            self.ranks = Ranks.of(group)

    @property
    def rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def size(self) -> int:
        return 1 if self.ranks is None else self.ranks.size

    def add_up(self, sums: Mapping[str, Tensor]) -> None:
        """Put the sum over ranks into each tensor."""
        if self.ranks is not None:
            for name, total in self.ranks.sum(sums).items():
                sums[name].copy_(total)

    def largest(self, number: int) -> int:
        """The largest of every rank's numbers."""
        return number if self.ranks is None else max(n for (n,) in self.ranks.each([number], torch.device("cpu")))

    def total(self, number: int) -> int:
        """The sum of every rank's numbers."""
        return number if self.ranks is None else self.ranks.count([number], torch.device("cpu"))[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait for all at the end of a block; if it fails in one process, it fails in all of them."""
        try:
            yield
        except BaseException:
            if self.ranks is not None:
                self.ranks.count([1], torch.device("cpu"))
            raise
        if self.ranks is not None and self.ranks.count([0], torch.device("cpu"))[0]:
            raise RuntimeError("another process of this build has failed; its own error says why")


def _leave() -> None:
    """Close the connections that were made here before the interpreter ends: gloo's threads abort it otherwise."""
    with suppress(Exception):  # of processes that have failed
        if dist.is_initialized():
            dist.destroy_process_group()
