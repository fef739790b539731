"""The processes that build an index together; one process alone is a team, too."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import Ranks
from . import loaders
from .store.fingerprints import of_batch


class Team:
    """Ranks, connected by gloo if there are several: chunks and sums are on the CPU.

    In ``lockstep`` all of them go through everything together, as each has a part of the model, and the first keeps
    what all have made. Otherwise every rank takes its share.
    """

    def __init__(self, *, lockstep: bool = False) -> None:
        self.ranks: Ranks | None = None
        self.lockstep = lockstep
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

    def takes(self, number: int) -> bool:
        """Does this rank go through the batch, or make the chunk, of this number?"""
        return self.lockstep or number % self.size == self.rank

    @property
    def keeps(self) -> bool:
        """Does this rank keep what it has made?"""
        return self.rank == 0 or not self.lockstep

    def of_first(self, numbers: list[int]) -> list[int]:
        """The first rank's numbers, in all of them."""
        if self.ranks is None:
            return numbers
        found: list[int] = json.loads(self.ranks.first(json.dumps(numbers).encode(), torch.device("cpu")))
        return found

    def batches(self, loader: Any, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Any]]:
        """`loaders.batches`; in lockstep all ranks have the same one before the model of any of them sees it."""
        found = loaders.batches(loader, wanted)
        while True:
            with self.between():
                each = next(found, None)
            self._check_same(each)
            if each is None:
                return
            yield each

    def first_batch(self, loader: Any, place: int = 0) -> Any:
        """`loaders.first_batch`, of which in lockstep all ranks have the same."""
        return next((batch for _, batch in self.batches(loader, lambda number: number == place)), None)

    def _check_same(self, each: tuple[int, Any] | None) -> None:
        if self.ranks is None or not self.lockstep:
            return
        mine = [-1, 0] if each is None else [each[0], int(of_batch(each[1])[:15], 16)]
        if any(theirs != mine for theirs in self.ranks.each(mine, torch.device("cpu"))):
            raise ValueError(
                "the processes have different batches: each holds a part of the model, and all go through the same "
                "data together. Pass every process the same loader, with all of the data"
            )

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

    def apart(self) -> AbstractContextManager[None]:
        """`together` for a block in which every rank computes alone.

        In lockstep nobody waits at its end: a rank that fails while the model computes ends, and so do others, which
        wait for it there. If it waited for them, none would ever hear of the error.
        """
        return nullcontext() if self.lockstep else self.together()

    def between(self) -> AbstractContextManager[None]:
        """`together` for what is done in lockstep while the model does not compute; elsewhere, part of `apart`."""
        return self.together() if self.lockstep else nullcontext()

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
