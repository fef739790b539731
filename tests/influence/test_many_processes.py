"""Builds by `torchrun`, killed whenever, with memory that stays bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import memory
from benchmarks.processes import forked
from persample import influence as pi
from tests.influence import programs
from tests.influence.programs import content, losses_fn

BUILD = "import sys; from tests.influence import programs; programs.build(0, 1, sys.argv[1])"
SLOW_BUILD = """
import sys, time
from tests.influence import programs
real = programs.losses_fn
def slow(model, batch):
    time.sleep(0.05)
    return real(model, batch)
programs.losses_fn = slow
print("ready", flush=True)
programs.build(0, 1, sys.argv[1])
"""
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def torchrun(ranks: int, folder: Path, script: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    ended = subprocess.run([*command, str(folder)], env=ENV, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_torchrun_makes_the_bytes_of_one_process(tmp_path: Path, ranks: int) -> None:
    (script := tmp_path / "build.py").write_text(BUILD)
    programs.build(0, 1, str(tmp_path / "one"))
    torchrun(ranks, tmp_path / "many", script)
    assert content(tmp_path / "many") == content(tmp_path / "one")
    (tmp_path / "many" / "chunks" / "00-000001.safetensors").unlink()
    torchrun(5 - ranks, tmp_path / "many", script)
    assert content(tmp_path / "many") == content(tmp_path / "one")


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    programs.build(0, 1, str(tmp_path / "whole"))
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", SLOW_BUILD, str(tmp_path / "killed")], env=ENV, stdout=subprocess.PIPE
        ) as build:
            assert build.stdout is not None
            build.stdout.readline()
            time.sleep(float(torch.rand((), generator=generator)) * 0.6)
            build.send_signal(signal.SIGKILL)
    programs.build(0, 1, str(tmp_path / "killed"))
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


CHUNK = 2**24
WIDE = (600, 600)


def risen(building: bool) -> int:
    """How far a plain step, or a build of four chunks, raises the memory of a process of its own."""
    torch.set_num_threads(1)
    memory._return_freed_memory()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE[0], WIDE[1]), nn.Tanh(), nn.Linear(WIDE[1], 5))
    batch = torch.randn(256, WIDE[0]), torch.randint(5, (256,))
    small = batch[0][:2], batch[1][:2]
    with tempfile.TemporaryDirectory() as folder:
        index = pi.Index(f"{folder}/a", model, losses_fn, sketch=pi.Blocks(32, 32))
        index.build([small] * 2, progress=False)  # loads kernels, makes matrices
        losses_fn(model, small).mean().backward()
        model.zero_grad()
        if not building:
            return memory.risen(lambda: losses_fn(model, batch).mean().backward())
        row = 4 * sum(n * m for n, m in index.subject.blocks.values())
        batches = 4 * CHUNK // (row * len(batch[0]))
        other = pi.Index(f"{folder}/b", model, losses_fn, sketch=pi.Blocks(32, 32))
        return memory.risen(lambda: other.build([batch] * batches, chunk_bytes=CHUNK, progress=False))


@pytest.mark.skipif(not memory.CLEAR_REFS.exists(), reason="the system does not tell the peak")
def test_a_build_takes_a_plain_step_and_two_chunks() -> None:
    assert forked(risen, True) <= forked(risen, False) + 2.2 * CHUNK


def asked(max_memory: int, queries: int) -> int:
    """How far a query of an index of 12 MB raises it."""
    torch.set_num_threads(1)
    memory._return_freed_memory()
    torch.manual_seed(0)
    model = nn.Linear(30, 30)
    data = [(torch.randn(1000, 30), torch.randint(30, (1000,)))] * 25
    with tempfile.TemporaryDirectory() as folder:
        index = pi.Index(folder, model, losses_fn, sketch=pi.Blocks(16, 30), dtype="int8")
        index.build(data, chunk_bytes=2**20, progress=False)  # one chunk at a time is mapped into memory
        query = data[0][0][:queries], data[0][1][:queries]
        index.query((query[0][:1], query[1][:1]), k=3)
        return memory.risen(lambda: index.query(query, k=3, max_memory=max_memory))


@pytest.mark.skipif(not memory.CLEAR_REFS.exists(), reason="the system does not tell the peak")
def test_a_query_keeps_to_its_memory() -> None:
    few, many = (forked(asked, 4_000_000, queries) for queries in (1, 500))
    assert few <= 4_000_000 + 4_000_000
    assert many <= 4_000_000 + 4_000_000 + 8 * 500 * 510 * 4  # the queries themselves, as gradients and as rows
