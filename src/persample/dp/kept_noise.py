"""Correlated noise between processes: kept in a file beside that of its run, or begun anew."""

from __future__ import annotations

import os
import warnings
from glob import escape
from os import PathLike
from pathlib import Path

from .correlated.stream import Stream, When
from .errors import PrivacyWarning
from .ledger import Ledger
from .team import Team


class KeptNoise:
    """What a run's noise remembers, saved and resumed with the run; nothing where noise is independent.

    Noise is gone on with from the very last step alone. From any other it would be taken away twice, and an example
    would move more than it is accounted for; then it is correlated anew, which moves less.
    """

    def __init__(self, stream: Stream | None, ledger: Ledger, team: Team) -> None:
        self._stream, self._ledger, self._team = stream, ledger, team
        self._why: str | None = None  # noise was forgotten, if that is not said yet

    def save(self, path: str | PathLike[str]) -> None:
        """Write what there is to remember, until there are no more steps."""
        if self._stream is not None:
            self._stream.save(self._file(path), self._now, finished=not self._ledger.left)
            if self._team.rank == 0:
                self._remove_surplus(path)

    def _remove_surplus(self, path: str | PathLike[str]) -> None:
        """Remove the files of processes that this run had before and has no more: they are of no use, and secret."""
        first = self._file(path)
        for file in first.parent.glob(f"{escape(first.name)}-*"):
            number = file.name.removeprefix(f"{first.name}-").removesuffix(".new")
            if number.isdecimal() and int(number) >= self._team.size:
                file.unlink(missing_ok=True)

    def resume(self, path: str | PathLike[str], steps: int) -> None:
        """Go on with the noise that was saved, if the file is of the last step that was made."""
        if self._stream is None or not self._ledger.steps:
            return
        if steps != self._ledger.steps:
            self.forget(f"{path} is of step {steps}")
            return
        why = self._stream.load(self._file(path), self._now)
        self._why = why if self._stream.size else None  # no other process knows of its file

    def forget(self, why: str) -> None:
        """Forget the noise of before: what it has left in the weights stays there."""
        if self._stream is not None:
            self._stream.forget(self._ledger.steps)
            self._why = why if self._team.rank == 0 else None

    def warn(self) -> None:
        """Say, once, that noise was forgotten."""
        why, self._why = self._why, None
        if why is not None and self._ledger.steps and self._ledger.left:
            warnings.warn(
                f"noise is correlated anew from step {self._ledger.steps + 1} on, as the noise before it is not known "
                f"({why}). The promise holds; the error is larger than expected. private.save keeps the noise in a "
                f"file beside its own, and private.resume goes on with it if no step was made since",
                PrivacyWarning,
                stacklevel=3,
            )

    @property
    def _now(self) -> When:
        return When(self._ledger.run, self._ledger.steps)

    def _file(self, path: str | PathLike[str]) -> Path:
        """Every process has its own."""
        return Path(f"{os.fspath(path)}.noise{f'-{self._team.rank}' if self._team.rank else ''}")
