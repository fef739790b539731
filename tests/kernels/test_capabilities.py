"""`make test-all` runs what chooses by the kind of CPU as on other kinds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.capabilities import OTHERS, others

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("own", "want"), [("AVX512", ("default", "avx2")), ("AVX2", ("default",)), ("DEFAULT", ()), ("SVE256", ())]
)
def test_only_kinds_with_less_than_this_one(own: str, want: tuple[str, ...]) -> None:
    assert others(own) == want


def test_the_command_prints_them() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.capabilities"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == list(OTHERS.get(torch.backends.cpu.get_cpu_capability(), ()))


def test_what_is_run_again_is_there() -> None:
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("BY_CPU := ")]
    paths = line.removeprefix("BY_CPU := ").split()
    assert {"tests/kernels", "tests/factors", "src"} <= set(paths)
    assert [path for path in paths if not (ROOT / path).exists()] == []
