"""What persample raises and warns with, beyond Python's own errors."""

from __future__ import annotations


class PerformanceWarning(UserWarning):
    """The answer is exact, but an op without a fast rule made it slow."""


class InteractionError(RuntimeError):
    """Independent samples were asked for, and one sample's loss depends on another sample."""


class UnsupportedError(RuntimeError):
    """The graph hides what is needed for an exact answer; the message names the remedy."""
