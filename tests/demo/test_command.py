"""The command: what it needs, what it says, and how it ends."""

from __future__ import annotations

import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from persample import demo, testing
from persample.demo import command
from persample.demo.progress import Parts


def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "report.html"
    drawn = tmp_path / "why.svg"
    assert demo.main(["--quick", "--out", str(out), "--picture", str(drawn)]) == 0
    assert "<svg" in drawn.read_text(encoding="utf-8")
    said = capsys.readouterr().out
    assert "private training: 12 of 12" in said
    assert re.search(r"replay of the run: LDS -?[\d.]+ \(-?[\d.]+ to -?[\d.]+\), 4 subsets", said)
    assert "against the definition: all agree" in said
    assert f"report: {out}" in said
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_wrong_gradient_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return {name: g * 1.001 for name, g in right(*args, **kwargs).items()}

    right = testing.compare.grad
    monkeypatch.setattr(testing.compare, "grad", wrong)
    out = tmp_path / "report.html"
    assert demo.main(["--quick", "--out", str(out)]) == 1
    assert "against the definition: WRONG" in capsys.readouterr().out
    assert "Something is WRONG" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(("module", "package"), command.NEEDS.items())
def test_a_missing_package_is_named(
    module: str, package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == module else find_spec(name))
    assert demo.main(["--out", str(tmp_path / "report.html")]) == 2
    said = capsys.readouterr().err
    assert said == f"persample demo: the demo needs {package}, not installed here: pip install 'persample[demo]'\n"
    assert not list(tmp_path.iterdir())


def test_a_directory_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--out", str(tmp_path)]) == 2
    assert "is a directory: name a file in it, for instance" in capsys.readouterr().err


def test_a_directory_is_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--out", str(tmp_path / "report.html"), "--picture", str(tmp_path)]) == 2
    assert f"--picture {tmp_path} is a directory: name a file in it" in capsys.readouterr().err


def test_a_place_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert demo.main(["--out", str(tmp_path / "file" / "report.html")]) == 2
    assert f"cannot be written (File exists: {tmp_path / 'file'}): choose another file" in capsys.readouterr().err


def test_a_file_that_is_not_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.os, "access", lambda path, mode: False)
    assert demo.main(["--out", str(tmp_path / "report.html")]) == 2
    assert "cannot be written (no permission): choose another file" in capsys.readouterr().err


def test_progress_bars_in_a_terminal() -> None:
    said = io.StringIO()
    parts = Parts(Console(file=said, force_terminal=True, width=100))
    with parts.part("counting", 3) as advance:
        for _ in range(3):
            advance()
    assert "counting" in said.getvalue()
    assert "3/3" in said.getvalue()
    assert parts.seconds["counting"] >= 0


def test_importing_needs_torch_alone() -> None:
    """The packages of the extra are asked for by `main`, not by an import."""
    code = "import sys, persample.demo; print([m for m in sys.argv[1:] if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.NEEDS], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip() == "[]"
