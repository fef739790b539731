"""Files of noise beside those of a run: one for each process that there is, and none of processes that were."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from persample.dp.correlated.encoders import banded
from persample.dp.correlated.stream import Stream
from persample.dp.kept_noise import KeptNoise

RUN = "a" * 16


def processes(count: int, steps: int) -> list[tuple[Stream, KeptNoise]]:
    """A sharded run after so many steps."""
    found = []
    for rank in range(count):
        stream = Stream(banded(2, 12, 0.0), 5, 0.5, 1.0, f"{rank} of {count}" if count > 1 else None)
        ledger: Any = SimpleNamespace(run=RUN, steps=steps, left=12 - steps)
        team: Any = SimpleNamespace(rank=rank, size=count)
        found.append((stream, KeptNoise(stream, ledger, team)))
    return found


def advance(stream: Stream, steps: int) -> None:
    for _ in range(steps):
        stream.memory.keep(0, np.ones(5))
        stream.memory.advance()


def save(path: Path, count: int, steps: int) -> None:
    for stream, kept in reversed(processes(count, steps)):  # rank 0 may be the last to write
        advance(stream, steps)
        kept.save(path)


def resumed(path: Path, count: int, steps: int) -> list[int]:
    """How many steps every process remembers."""
    found = processes(count, steps)
    for _, kept in found:
        kept.resume(path, steps)
    return [stream.memory.steps for stream, _ in found]


@pytest.mark.parametrize("fewer", [1, 2])
def test_files_of_processes_that_are_no_more_are_removed(tmp_path: Path, fewer: int) -> None:
    path = tmp_path / "run [1]"  # which is no pattern of names
    save(path, 12, 4)
    assert len(os.listdir(tmp_path)) == 12
    others = ["run 1.noise-9", "run [1].noise-9x", "run [1].noise-a", "run [1].noise-"]
    for name in [*others, "run [1].noise-9.new"]:
        (tmp_path / name).write_text("")
    assert resumed(path, fewer, 4) == [0] * fewer  # noise of other processes is not gone on with
    save(path, fewer, 5)
    own = ["run [1].noise", *[f"run [1].noise-{rank}" for rank in range(1, fewer)]]
    assert sorted(os.listdir(tmp_path)) == sorted([*own, *others])
    assert resumed(path, fewer, 5) == [5] * fewer
    assert resumed(path, 12, 5) == [0] * 12


def test_files_of_all_processes_stay(tmp_path: Path) -> None:
    save(tmp_path / "run", 3, 4)
    save(tmp_path / "run", 3, 5)
    assert sorted(os.listdir(tmp_path)) == ["run.noise", "run.noise-1", "run.noise-2"]
    assert resumed(tmp_path / "run", 3, 5) == [5, 5, 5]
