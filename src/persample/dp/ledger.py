"""What has been spent: a count in memory, and a journal on disk that is ahead of every release."""

from __future__ import annotations

import json
import math
import os
import secrets
from pathlib import Path
from typing import Any, BinaryIO

from .errors import PrivacyError
from .plan import Plan


class Journal:
    """An append-only file: a header that names the run, and a line for every step, on disk before its release.

    A line that was torn by a crash counts as a step.
    """

    def __init__(self, path: Path, header: dict[str, Any], lines: list[str]) -> None:
        self.path, self.header, self._lines = path, header, lines

    @classmethod
    def begin(cls, path: Path, header: dict[str, Any]) -> Journal:
        """A new file; it must not exist."""
        with path.open("xb") as file:
            _write(file, json.dumps(header))
        sync_directory(path.parent)
        return cls(path, header, [])

    @classmethod
    def read(cls, path: Path) -> Journal:
        """A file of an earlier process; a torn last line is closed, so that the next one starts afresh."""
        data = path.read_bytes()
        first, *lines = data.decode(errors="replace").split("\n")
        try:
            header = json.loads(first)
        except json.JSONDecodeError as error:
            raise PrivacyError(f"{path} is not the journal of a private run: {error}") from error
        if lines and lines[-1]:
            with path.open("ab") as file:
                _write(file, "")
        return cls(path, header, [line for line in lines if line])

    def add(self, opens_pass: bool) -> None:
        """One more step; returns when it is on disk."""
        line = "pass" if opens_pass else "step"
        with self.path.open("r+b") as file:  # not "ab", which would begin a lost file anew
            file.seek(0, os.SEEK_END)
            _write(file, line)
        self._lines.append(line)

    @property
    def steps(self) -> int:
        """What was counted when the journal began, and every line since."""
        return int(self.header["steps"]) + len(self._lines)

    @property
    def passes(self) -> int:
        """Passes over shuffled data; a torn line counts as one."""
        return int(self.header["passes"]) + sum(line != "step" for line in self._lines)


class Ledger:
    """Counts steps, in memory and in the journal if there is one; never backward."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.steps, self.passes = plan, 0, 0
        self.run = secrets.token_hex(8)
        self.journal: Journal | None = None

    def account(self, opens_pass: bool) -> None:
        """Count a step that is about to be released."""
        if self.steps >= self.plan.length or (opens_pass and not self.left):
            raise PrivacyError(
                f"the plan is used up: {self.steps} of {self.plan.length} steps are done, and epsilon "
                f"{self.spent():.4g} is spent. More steps need a plan that had them from the start"
            )
        if self.journal is not None:
            self.journal.add(opens_pass)
        self.steps += 1
        self.passes += opens_pass

    @property
    def left(self) -> int:
        """Steps that may still be made, beginning with a new pass if batches are shuffled.

        What was left over of a pass is lost, because the next one may show the same examples again.
        """
        left = self.plan.length - self.steps
        if self.plan.sampling == "shuffled":
            per_pass = int(self.plan.steps_per_epoch)
            left = min(left, (math.ceil(self.plan.length / per_pass) - self.passes) * per_pass)
        return max(left, 0)

    def spent(self) -> float:
        """Epsilon so far."""
        return self.plan.spent(self.steps, self.passes)

    def begin_journal(self, path: Path) -> None:
        """From now on, write every step down first."""
        header = {"run": self.run, "plan": self.plan.as_dict(), "steps": self.steps, "passes": self.passes}
        self.journal = Journal.begin(path, header)

    def follow(self, journal: Journal) -> None:
        """Go on with the journal of an earlier process."""
        wrong = self.plan.differences(journal.header["plan"])
        if wrong:
            raise PrivacyError(f"{journal.path} is the journal of a run with another plan: {'; '.join(wrong)}")
        self.run, self.journal = journal.header["run"], journal
        self.advance(journal.steps, journal.passes)

    def advance(self, steps: int, passes: int) -> None:
        """Count at least so many."""
        self.steps, self.passes = max(self.steps, steps), max(self.passes, passes)


def _write(file: BinaryIO, line: str) -> None:
    """A line, on disk when this returns."""
    file.write(f"{line}\n".encode())
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """So that the name of a new file is on disk, too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
