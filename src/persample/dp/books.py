"""Accounts of several processes: the first one keeps them, and all go by what it says."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

from .clips import Clipper
from .ledger import Ledger
from .state import Checkpoint, follow_journal, open_journal, write
from .team import Team


class Books:
    """Opens a run's journal in the first process; counts, and a bound that moves, are then the same in all of them.

    Processes that differ in them would draw different batches, or clip by another bound than the noise is for.
    """

    def __init__(self, ledger: Ledger, clipper: Clipper, team: Team) -> None:
        self._ledger, self._clipper, self._team = ledger, clipper, team

    def open(self, journal: str | PathLike[str] | None) -> bool:
        """Begin, or go on with the journal that is given; whether there was one."""
        return bool(self._in_first_process(lambda: journal is not None and open_journal(self._ledger, journal)))

    def take_up(self, checkpoint: Checkpoint) -> None:
        """Go on from a state, and from the journal that is kept already, if there is one."""
        self._in_first_process(lambda: self._load(checkpoint, lambda: self._ledger.read_again(checkpoint.accounts)))

    def resume(self, path: str | PathLike[str], journal: str, checkpoint: Checkpoint) -> None:
        """Go on from a file, and from the journal that it names."""
        known = checkpoint.accounts
        self._in_first_process(
            lambda: self._load(checkpoint, lambda: follow_journal(self._ledger, path, journal, known))
        )

    def save(self, path: str | PathLike[str], state: dict[str, Any], states: dict[str, Any]) -> None:
        """Write a file; its journal is begun with the first."""
        self._in_first_process(lambda: write(path, self._ledger, state, states))

    def _load(self, checkpoint: Checkpoint, follow: Callable[[], None]) -> None:
        if _form(checkpoint.bound) != _form(self._clipper.bound):
            raise ValueError(
                f"the state of private training is damaged: its bound {checkpoint.bound} is not of the form that the "
                f"clip has, {self._clipper.bound}"
            )
        follow()
        self._ledger.run = checkpoint.run
        self._ledger.advance(checkpoint.steps, checkpoint.passes)
        if checkpoint.bound is not None:
            self._clipper.bound = checkpoint.bound

    def _in_first_process(self, do: Callable[[], Any]) -> Any:
        ledger, clipper = self._ledger, self._clipper
        told = self._team.by_first(lambda: [do(), ledger.run, ledger.steps, ledger.passes, clipper.bound])
        result, ledger.run, ledger.steps, ledger.passes, clipper.bound = told
        return result


def _form(bound: float | list[float] | None) -> int | None:
    """How many bounds there are, if they are in a list; 0 for a single one."""
    return len(bound) if isinstance(bound, list) else None if bound is None else 0
