"""Whether rows are grouped by sample as if samples had different numbers of them, though these may have as many each.

Rows of equal numbers have shorter ways. Whoever promises that what is computed for one sample does not depend on how
many rows others have (private sums over users) must not take these ways when they happen to be open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["always_ragged", "is_always_ragged"]

_lock = threading.Lock()
_asked = 0  # how many ask for it now


def is_always_ragged() -> bool:
    """Are all rows to be grouped as those of samples with different numbers of them?"""
    return _asked > 0


@contextmanager
def always_ragged(wanted: bool = True) -> Iterator[None]:
    """Inside they are, if it is wanted: in all threads, as a backward calls hooks in one of the device's own."""
    _ask(int(wanted))
    try:
        yield
    finally:
        _ask(-int(wanted))


def _ask(more: int) -> None:
    global _asked
    with _lock:
        _asked += more
