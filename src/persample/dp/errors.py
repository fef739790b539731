"""What private training refuses and warns with."""

from __future__ import annotations


class PrivacyError(RuntimeError):
    """Something was asked for that the accounting does not cover; nothing was released."""


class PrivacyWarning(UserWarning):
    """The promise of a run may not be all that there is to know."""
