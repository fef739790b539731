"""The command, called as in a shell."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from persample import cli

Run = Callable[..., tuple[int, str, str]]


def command(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs the command: exit code, stdout and stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as leaving:
            cli.main(argv)
        out, err = capsys.readouterr()
        return int(leaving.value.code or 0), out, err

    return call
