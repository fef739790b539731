"""The gallery: every script is listed, and some test runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "__init__"]
PAGE = (ROOT / "docs" / "examples.md").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_example_is_listed_and_run(script: Path) -> None:
    assert f"`{script.name}`" in PAGE
    assert any(f'"{script.stem}' in path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


def test_curvature_is_that_of_other_libraries() -> None:
    """Of ``torch.func`` in any case, of others where they are installed."""
    command = [sys.executable, str(ROOT / "examples" / "curvature_digits.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    differences = re.findall(r"difference from \S+: (\S+)", done.stdout)
    assert differences
    assert all(float(each) < 1e-10 for each in differences)
    found = re.search(r"winning logit: (\S+) if right, (\S+) if wrong", done.stdout)
    assert found
    assert float(found[1]) < float(found[2])


@pytest.mark.slow
def test_distilled_images_teach_more_than_real_ones() -> None:
    """At least a tenth more of the test images are recognised."""
    command = [sys.executable, str(ROOT / "examples" / "distilled_digits.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    real, distilled = map(int, re.findall(r"(\d+)%", done.stdout))
    assert distilled >= real + 10


@pytest.mark.slow
def test_the_monitored_run_finds_wrong_labels() -> None:
    """At least a quarter of the images that stood out; one in ninety is wrong."""
    command = [sys.executable, str(ROOT / "examples" / "monitored_digits.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.search(r"stood out, (\d+)% were mislabelled", done.stdout)
    assert found
    assert int(found[1]) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("name", ["influence_digits", "influence_gpt", "influence_lora"])
def test_influence_finds_what_it_is_asked_for(name: str) -> None:
    """The scripts say themselves, by their status, whether it is so."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "%" in done.stdout or "answers are right" in done.stdout
