"""What private training refuses with."""

from __future__ import annotations


class PrivacyError(RuntimeError):
    """Something was asked for that the accounting does not cover; nothing was released."""
