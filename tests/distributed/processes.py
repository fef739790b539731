"""Processes that run the same function together, connected by gloo, started once and used by many tests."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE = 600.0  # seconds for one function, before the processes are ended: for what hangs, not for what is slow
_TIMEOUT = timedelta(seconds=300)  # for one collective

# The first start imports torch once; all processes are copies of that one.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["persample", "torch.distributed.fsdp", "tests.distributed.processes"])

Worker = Callable[..., Any]  # called as worker(rank, world, *args); must be importable by name


class Processes:
    """A group of ``world`` processes."""

    def __init__(self, world: int, folder: Path) -> None:
        self.world, self.folder, self.starts = world, folder, 0
        self.ends: list[Connection] = []
        self.processes: list[Any] = []

    def run(self, worker: Worker, *args: Any) -> list[Any]:
        """What the function returns in every process; an error in one of them ends all, and is shown."""
        if not self.processes:
            self._start()
        for end in self.ends:
            end.send((worker, args))
        deadline = time.monotonic() + _PATIENCE
        answers = [self._answer(rank, deadline) for rank in range(self.world)]
        wrong = [f"rank {rank}:\n{text}" for rank, (fine, text) in enumerate(answers) if not fine]
        if wrong:
            self.stop()
            raise AssertionError("\n".join(wrong))
        return [value for _, value in answers]

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        try:
            if self.ends[rank].poll(max(0.0, deadline - time.monotonic())):
                found: tuple[bool, Any] = self.ends[rank].recv()
                return found
            return False, f"no answer after {_PATIENCE} s"
        except EOFError:
            return False, "the process has ended"

    def _start(self) -> None:
        self.starts += 1
        store = str(self.folder / f"store-{self.starts}")
        for rank in range(self.world):
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, self.world, store, there), daemon=True)
            process.start()
            there.close()
            self.ends.append(here)
            self.processes.append(process)

    def stop(self) -> None:
        """End the processes; the next run starts new ones."""
        for end in self.ends:
            end.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self.ends, self.processes = [], []


def connect(rank: int, world: int, store: str, timeout: timedelta = _TIMEOUT) -> None:
    """Join a group of processes of this machine."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)


def _serve(rank: int, world: int, store: str, end: Connection) -> None:
    connect(rank, world, store)
    while True:
        try:
            worker, args = end.recv()
        except EOFError:
            break
        torch.manual_seed(rank)
        try:
            answer = True, worker(rank, world, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        end.send(answer)
    dist.destroy_process_group()
