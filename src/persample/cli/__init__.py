"""The command ``persample``: audit a model, ask which examples made it what it is, time it, show the demo."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

__all__ = ["main"]

_NEEDS = ("typer", "rich")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and leave Python with its exit code.

    >>> from persample import cli
    >>> cli.main(["--version"])
    Traceback (most recent call last):
    SystemExit: 0
    """
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        print(
            f"persample: the command line needs {' and '.join(missing)}, not installed here: "
            f"pip install 'persample[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2)
    from .app import run  # not before it is known that what it imports is there

    run(sys.argv[1:] if argv is None else argv)
