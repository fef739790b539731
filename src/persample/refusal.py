"""What cannot be compiled, and why."""

from __future__ import annotations


class NotCompiled(Exception):
    """The reason why the eager engine answers: never seen by users, but for its words."""
