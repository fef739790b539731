"""The types of the package, as a type checker sees them in code that uses it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def mypy(*files: Path) -> str:
    """What it says, by the rules that it has without this repository's settings."""
    # The repository's cache: mypy reads PyTorch once, not in every test.
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache'}"]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, cwd=HERE, timeout=500)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.slow
def test_types_are_as_documented() -> None:
    assert "Success" in mypy(HERE / "user_code.py")


@pytest.mark.slow
def test_mistakes_are_found() -> None:
    path = HERE / "wrong_user_code.py"
    marked = {n for n, line in enumerate(path.read_text().splitlines(), 1) if "# wrong:" in line}
    assert {int(n) for n in re.findall(r"wrong_user_code\.py:(\d+): error", mypy(path))} == marked
    assert len(marked) > 5
