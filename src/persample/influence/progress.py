"""One line in a terminal, with rate and time left; nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_SECONDS = 0.2  # between two lines


class Progress:
    """Counts samples and steps, and writes them over each other on one line."""

    def __init__(self, title: str, total: int | None, stream: TextIO) -> None:
        self.title, self.total, self.stream = title, total, stream
        self.steps = self.samples = 0
        self.begun = time.perf_counter()
        self._written = 0.0

    def advance(self, samples: int) -> None:
        """One step more."""
        self.steps, self.samples = self.steps + 1, self.samples + samples
        if (now := time.perf_counter()) - self._written >= _SECONDS or self.steps == self.total:
            self._written = now
            self.stream.write(f"\r\x1b[K{self.line(now - self.begun)}")
            self.stream.flush()

    def line(self, seconds: float) -> str:
        """What is shown after some time."""
        rate = self.samples / max(seconds, 1e-9)
        if self.total is None:
            return f"{self.title}: {self.samples:,} samples, {rate:,.0f}/s"
        left = seconds / max(self.steps, 1) * max(0, self.total - self.steps)
        filled = 20 * self.steps // max(self.total, 1)
        return (
            f"{self.title} {'█' * filled}{'░' * (20 - filled)} {self.steps:,} of {self.total:,} batches, "
            f"{rate:,.0f} samples/s, {_clock(left)} left"
        )


class Silent(Progress):
    """Shows nothing."""

    def advance(self, samples: int) -> None:
        self.steps, self.samples = self.steps + 1, self.samples + samples


@contextmanager
def progress(title: str, total: int | None, show: bool | None, first: bool = True) -> Iterator[Progress]:
    """By default, shown by the ``first`` process in a terminal."""
    shown = (sys.stderr.isatty() if show is None else show) and first
    bar = (Progress if shown else Silent)(title, total, sys.stderr)
    yield bar
    if shown and bar.steps:
        sys.stderr.write("\n")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
