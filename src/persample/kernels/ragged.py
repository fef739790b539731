"""Whether rows are grouped by sample as if samples had different numbers of them, though these may have as many each.

Rows of equal numbers have shorter ways. Whoever promises that what is computed for one sample does not depend on how
many rows others have (private sums over users) must not take these ways when they happen to be open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["always_ragged", "is_always_ragged"]

_always_ragged: ContextVar[bool] = ContextVar("always_ragged", default=False)


def is_always_ragged() -> bool:
    """Are all rows to be grouped as those of samples with different numbers of them?"""
    return _always_ragged.get()


@contextmanager
def always_ragged(wanted: bool) -> Iterator[None]:
    """Inside, in this thread, they are, or not."""
    token = _always_ragged.set(wanted)
    try:
        yield
    finally:
        _always_ragged.reset(token)
