"""Where things are printed: results to stdout, progress and complaints to stderr, JSON and HTML where asked."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

STDOUT = "-"
WRONG_USE = 2


def fail(command: str, message: object, code: int = WRONG_USE) -> NoReturn:
    """Complain in one line and leave, by default with the code of wrong use."""
    Console(stderr=True, soft_wrap=True).print(
        f"[bold red]persample {command}:[/] {escape(' '.join(str(message).split()))}", highlight=False
    )
    raise typer.Exit(code)


def check_writable(command: str, *paths: str | None) -> None:
    """Complain about a file that cannot be written before the work is done, not after it."""
    for path in paths:
        if path is None or path == STDOUT:
            continue
        place = Path(path)
        if place.is_dir():
            fail(command, f"{path} is a directory: name a file in it")
        if not place.parent.is_dir():
            fail(command, f"{path} cannot be written: there is no directory {place.parent}")
        existed = place.exists()
        try:
            place.open("ab").close()
        except OSError as error:
            fail(command, f"{path} cannot be written: {error.strerror}")
        if not existed:
            place.unlink()


def write_json(command: str, data: Any, path: str, unwritten: int = WRONG_USE) -> None:
    """Write JSON to a file, or to stdout for ``-``. It has no word for NaN and infinity: they are null."""
    text = json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False)
    if path == STDOUT:
        print(text)
    else:
        write_text(command, text + "\n", Path(path), unwritten)


def write_text(command: str, text: str, path: Path, unwritten: int = WRONG_USE) -> None:
    """Write a file, or complain and leave with the code for that."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(command, f"{path} could not be written: {error.strerror}", unwritten)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


class Stages:
    """Says which stage of the work has begun, and how much of it is done."""

    def __init__(self, bar: Progress, count: int) -> None:
        self._bar, self._task, self._begun = bar, bar.add_task("starting", total=count), 0

    def __call__(self, stage: str) -> None:
        self._bar.update(self._task, description=stage, completed=self._begun)
        self._begun += 1

    def share(self, done: float) -> None:
        """Of the stage that has begun last."""
        self._bar.update(self._task, completed=self._begun - 1 + done)


@contextmanager
def working(stages: int, *, quiet: bool) -> Iterator[Stages]:
    """A progress bar on stderr; what the user's code prints goes there, too, so that stdout holds results alone."""
    columns = (SpinnerColumn(), BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with (
        Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar,
        redirect_stdout(sys.stderr),
    ):
        yield Stages(bar, stages)
