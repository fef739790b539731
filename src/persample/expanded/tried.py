"""Readings of a call's results that were refused, and what is to be said if none is left."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._errors import InteractionError
from .verdicts import Disagreement, Reading


@dataclass
class Tried:
    """Readings that were refused, and why."""

    moved: dict[str, None] = field(default_factory=dict)  # functions that put samples elsewhere
    expected: InteractionError | None = None  # of readings with every batch where it would be
    returned: InteractionError | None = None  # of other readings of the results
    unlikely: InteractionError | None = None  # of all others
    unproven: bool = False  # was there a reading that lacks evidence, and nothing else?

    def disagrees(self, reading: Reading, error: Disagreement) -> None:
        """What is known contradicts this reading, or does not confirm it."""
        self.moved.update({error.op: None} if error.op and all(reading.promised) else {})
        self.unproven = self.unproven or error.unproven

    def interacts(self, reading: Reading, error: InteractionError, wrong: Disagreement | None) -> None:
        """Samples meet, unless the reading is ``wrong``."""
        if wrong is not None:
            self.disagrees(reading, wrong)
        elif reading.usual:
            self.expected = self.expected or error
        elif reading.returned:
            self.returned = self.returned or error
        else:
            self.unlikely = self.unlikely or error

    def certain(self) -> tuple[str, ...]:
        """The ops in which samples meet, if that is beyond doubt."""
        found = self.expected or (None if self.unproven else self.returned)
        return found.ops if found else ()

    def likeliest(self) -> tuple[str, ...]:
        """The ops in which samples meet, or that put them elsewhere, after all has been tried."""
        return self.unlikely.ops if self.unlikely else tuple(self.moved)
