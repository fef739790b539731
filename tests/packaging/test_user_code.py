"""The types of the package, as a type checker sees them in code that uses it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WRONG = HERE / "wrong_user_code.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said() -> str:
    """What mypy says of both files, by the rules that it has without this repository's settings."""
    # A cache of its own, because other settings would empty the repository's.
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        f"--cache-dir={ROOT / '.mypy_cache' / 'user'}",
    ]
    files = [HERE / "user_code.py", WRONG]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, cwd=HERE, timeout=500)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_types_are_as_documented(said: str) -> None:
    assert [line for line in said.splitlines() if ": error" in line and WRONG.name not in line] == []
    assert "(checked 2 source files)" in said


def test_mistakes_are_found(said: str) -> None:
    marked = {n for n, line in enumerate(WRONG.read_text().splitlines(), 1) if "# wrong:" in line}
    assert {int(n) for n in re.findall(rf"{WRONG.name}:(\d+): error", said)} == marked
    assert len(marked) > 5
