"""How far long work is, and how long it will still take: one line on standard error, written again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_SECONDS_BETWEEN = 0.2
_WIDTH = 24


@contextmanager
def counted(
    title: str, total: int, *, done: int = 0, show: bool | None = None, out: TextIO | None = None
) -> Iterator[Callable[[], None]]:
    """Count pieces of work: the function yielded is called after each. By default shown in terminals alone."""
    out = sys.stderr if out is None else out
    shown = out.isatty() if show is None else show
    start, last, finished = time.monotonic(), 0.0, done

    def advance() -> None:
        nonlocal finished, last
        finished += 1
        now = time.monotonic()
        if shown and (now - last > _SECONDS_BETWEEN or finished == total):
            last = now
            out.write("\r" + _line(title, finished, total, (now - start) / (finished - done)))
            out.flush()

    try:
        yield advance
    finally:
        if shown and last:
            out.write("\n")


def _line(title: str, finished: int, total: int, seconds_each: float) -> str:
    bar = "#" * (finished * _WIDTH // max(total, 1))
    left = seconds_each * (total - finished)
    return (
        f"{title} [{bar:<{_WIDTH}}] {finished}/{total}, {_duration(seconds_each * finished)}, {_duration(left)} left "
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
