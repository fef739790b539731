"""Killed, interrupted or without disk space, at calls chosen at random: no noise twice, and nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tries", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_at_any_call(tries: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.dp.anywhere", str(tmp_path), str(tries)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
