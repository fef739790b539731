"""The command, called as in a shell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from persample import cli

Run = Callable[..., tuple[int, str, str]]


class Shell:
    """Runs the command in a folder of its own: exit code, stdout and stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capsys = capsys
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", sys.path.copy())

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as leaving:
            cli.main(argv)
        out, err = self._capsys.readouterr()
        return int(leaving.value.code or 0), out, err
