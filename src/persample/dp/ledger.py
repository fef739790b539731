"""What has been spent: a count in memory, and a journal on disk that is ahead of every release."""

from __future__ import annotations

import math
import secrets
from pathlib import Path

from .accounts import Accounts
from .errors import PrivacyError
from .journal import Journal
from .plan import Plan


class Ledger:
    """Counts steps, in memory and in the journal if there is one; never backward."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.steps, self.passes = plan, 0, 0
        self.run = secrets.token_hex(8)
        self.journal: Journal | None = None

    @property
    def accounts(self) -> Accounts:
        """The run's accounts, for its journal or a file."""
        return Accounts(self.run, self.plan.as_dict(), self.steps, self.passes)

    def account(self, opens_pass: bool) -> None:
        """Count a step that is about to be released."""
        if self.journal is not None:
            self.advance(self.journal.steps, self.journal.passes)
        if self.steps >= self.plan.length or (opens_pass and not self.left):
            spent = "" if self.plan.delta is None else f", and epsilon {self.spent():.4g} is spent"
            raise PrivacyError(
                f"the plan is used up: {self.steps} of {self.plan.length} steps are done{spent}. More steps need a "
                f"plan that had them from the start"
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

    def spent(self, delta: float | None = None) -> float:
        """Epsilon so far, at the plan's delta or another."""
        return self.plan.spent(self.steps, self.passes, delta)

    def begin_journal(self, path: Path) -> None:
        """Begin a journal, to which every step is written before its release."""
        self.journal = Journal.begin(path, self.accounts)

    def follow(self, path: Path, known: Accounts | None = None) -> None:
        """Go on with the journal of an earlier process, which must have seen all that is ``known`` to be spent.

        Everything is checked before the file is claimed, and nothing is written.
        """
        if not path.exists():
            raise PrivacyError(
                f"the journal {path} is missing, and with it what was spent after the file was written: put it back, "
                f"or say where it is by dp.Private(..., journal=...)"
            )
        journal = Journal.read(path)
        wrong = self.plan.differences(journal.header.plan)
        if wrong:
            raise PrivacyError(f"{journal.path} is the journal of a run with another plan: {'; '.join(wrong)}")
        if known is not None:
            self._compare(journal, known)
        journal.claim()
        self.run, self.journal = journal.header.run, journal
        self.advance(journal.steps, journal.passes)

    def read_again(self, known: Accounts) -> None:
        """Take up the journal as it is now, if there is one: it may count a step that failed, too."""
        if self.journal is not None:
            self.follow(self.journal.path, known)

    def _compare(self, journal: Journal, known: Accounts) -> None:
        if journal.header.run != known.run:
            raise PrivacyError(f"the journal {journal.path} is not that of the run {known.run} in this state")
        least = known if self.run != known.run or known.steps > self.steps else self.accounts
        if journal.steps < least.steps or journal.passes < least.passes:
            raise PrivacyError(
                f"the journal {journal.path} counts {journal.steps} steps, but {least.steps} were made: it was cut, or "
                f"is an old copy, and what was spent since is lost. Put back the whole file"
            )

    def advance(self, steps: int, passes: int) -> None:
        """Raise the counts to at least so many steps and passes."""
        self.steps, self.passes = max(self.steps, steps), max(self.passes, passes)
