"""Progress bars in a terminal, plain lines elsewhere; and how long each part took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LINES = 4  # per part, where there is no terminal


class Parts:
    """The parts of a run, one after the other.

    >>> from rich.console import Console
    >>> parts = Parts(Console(force_terminal=False))
    >>> with parts.part("counting", 8) as advance:
    ...     for _ in range(8):
    ...         advance()
    counting: 2 of 8
    counting: 4 of 8
    counting: 6 of 8
    counting: 8 of 8, 0.0 s
    >>> list(parts.seconds)
    ['counting']
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Count the steps of a part: the function yielded is called after each."""
        start = time.perf_counter()
        with (self._bar if self.console.is_terminal else self._lines)(title, total) as advance:
            yield advance
        self.seconds[title] = time.perf_counter() - start
        if not self.console.is_terminal:
            self.console.print(f"{title}: {total} of {total}, {self.seconds[title]:.1f} s", highlight=False)

    @contextmanager
    def timed(self, title: str) -> Iterator[None]:
        """A part that shows by itself how far it is."""
        start = time.perf_counter()
        yield
        self.seconds[title] = time.perf_counter() - start
        self.console.print(f"{title}: {self.seconds[title]:.1f} s", highlight=False)

    @contextmanager
    def _bar(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task)

    @contextmanager
    def _lines(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            if done < total and done * _LINES // total > (done - 1) * _LINES // total:
                self.console.print(f"{title}: {done} of {total}", highlight=False)

        yield advance
