"""Releases of PyTorch: old ones are refused at import in one line, new ones are told once, and all files agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from persample._releases import OLDEST, TESTED, check, release

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = "{}.{}".format(*OLDEST)


@pytest.mark.parametrize(
    ("version", "want"),
    [
        ("2.13.0", (2, 13)),
        ("2.13.0+cpu", (2, 13)),
        ("2.9.1+cu128", (2, 9)),
        ("2.16.0a0+git123", (2, 16)),
        ("2.15.0.dev20261101", (2, 15)),
        ("2.14.0rc2", (2, 14)),
        ("10.0", (10, 0)),
        ("3.0.0", (3, 0)),
        ("", None),
        ("git-abc", None),
    ],
)
def test_versions_are_read(version: str, want: tuple[int, int] | None) -> None:
    assert release(version) == want


@pytest.mark.parametrize("version", ["2.9.1", "2.9.1+cu128", "2.2.0a0+git123", "1.13.1", "2.1.0"])
def test_old_releases_are_refused(version: str) -> None:
    said = rf"persample needs torch {WRITTEN} or later, and this is torch {re.escape(version)}: pip install 'torch>="
    with pytest.raises(ImportError, match=said) as caught:
        check(version)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("one", TESTED)
@pytest.mark.parametrize("rest", ["0", "1", "0+cpu", "0a0+git123"])
def test_tested_releases_pass_without_a_word(one: tuple[int, int], rest: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(f"{one[0]}.{one[1]}.{rest}")


@pytest.mark.parametrize("version", [f"2.{TESTED[-1][1] + 1}.0", "2.99.0a0+git123", "3.0.0", "10.1", "git-abc"])
def test_untested_releases_are_told(version: str) -> None:
    every = ", ".join(f"{a}.{b}" for a, b in TESTED)
    with pytest.warns(UserWarning, match=rf"tested with torch {every}, not yet with {re.escape(version)}") as seen:
        check(version)
    assert len(seen) == 1


IMPORT = """
import sys, warnings, torch
torch.__version__ = sys.argv[1]
warnings.simplefilter("always")
import persample
import persample.dp, persample.testing
"""


def imported(version: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with a torch that says to be of this version."""
    return subprocess.run([sys.executable, "-c", IMPORT, version], capture_output=True, text=True)


def test_an_old_release_is_refused_at_import_before_anything_of_it_is_missed() -> None:
    done = imported("2.9.1+cu128")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: persample needs torch {WRITTEN} or later")


def test_an_untested_release_is_told_once_at_the_line_of_the_import() -> None:
    done = imported("2.99.0a0+git123")
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "persample was tested" in line]
    assert said.startswith("<string>:5: UserWarning: persample was tested with torch")
    assert "2.99.0a0+git123" in said


def test_nothing_else_is_imported_before_the_check() -> None:
    code = (
        "import sys, torch; torch.__version__ = '2.0'\n"
        "try: import persample\n"
        "except ImportError: print([n for n in sys.modules if n.startswith('persample')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[]", "['persample._releases']")


def test_releases_are_in_order_and_named_everywhere() -> None:
    assert list(TESTED) == sorted(set(TESTED))
    assert TESTED[0] == OLDEST
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={WRITTEN}" in project["dependencies"]
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert release(pinned[1]) in TESTED
    for page in ("README.md", "docs/quickstart.md"):
        assert f"torch {WRITTEN} or later" in (ROOT / page).read_text(), page
    assert "(tested up to {}.{})".format(*TESTED[-1]) in " ".join((ROOT / "README.md").read_text().split())


def test_this_release_is_one_that_was_tested() -> None:
    found = release(torch.__version__)
    if found not in TESTED:
        pytest.skip(f"torch {torch.__version__} is not among the releases that were tested: {TESTED}")
