"""Numbers for releases: none is used twice, whatever fails, is forked or is copied."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import PrivacyError


class Releases:
    """Numbers every release of a run, and says whether there may be another.

    Noise is keyed by the number, which is taken before anything can fail and never given back. After a release that did
    not come to its end nobody knows what was written down or told of it: there is none after it until the run is
    resumed, which renews all keys. A forked process has the same keys, so that it may not use them.
    """

    def __init__(self) -> None:
        self.upcoming = 0  # the number of the next release
        self.renew()

    def renew(self) -> None:
        """Allow releases again, in this process: keys are new."""
        self._unfinished, self._process = False, _process()

    def stop(self) -> None:
        """Allow no release until keys are new."""
        self._unfinished = True

    def check(self) -> None:
        """Refuse if there may be no release."""
        if self._process != _process():
            raise PrivacyError(
                "this process was forked from the one that the run belongs to: both would draw the same noise, so that "
                "the difference of their weights shows the data, and each would count its own steps alone. Make a "
                "dp.Private in this process, or once the other one has ended, private.resume(path) here"
            )
        if self._unfinished:
            raise PrivacyError(
                "the last step of this run failed, or is under way: its noise is used up, and its budget may be spent. "
                "Nothing is released until the run is resumed, which counts that step if it was accounted for: by "
                "private.resume(path) from the last private.save; with the weights as they are, by "
                "private.load_state_dict(private.state_dict()); or by a new dp.Private(..., journal=...) on its journal"
            )

    @contextmanager
    def one(self) -> Iterator[int]:
        """A context around a release, with its number; a release that raises is not finished, and stops the run."""
        self.check()
        self.stop()
        number, self.upcoming = self.upcoming, self.upcoming + 1
        yield number
        self._unfinished = False


class Copied:
    """What copies and pickles hold in the place of a `Private`: models and trainers that hold one can be copied."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise PrivacyError(
            f"this is a copy of a dp.Private, and has no {name}: it would draw the same noise as the original, and "
            f"count its own steps alone. Make a new dp.Private; to go on in the place of the original, give its "
            f"load_state_dict the original's state_dict()"
        )


_token = secrets.token_bytes(16)


def _process() -> tuple[int, bytes]:
    """What no other process has: its id, which may be given away once it has ended, and a token."""
    return os.getpid(), _token


def _renew_token() -> None:
    global _token
    _token = secrets.token_bytes(16)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_token)
