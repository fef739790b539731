"""What can be wrong with an index on disk."""

from __future__ import annotations


class MismatchError(ValueError):
    """The index on disk belongs to another model, other data, another sketch or another seed."""


class DamagedError(ValueError):
    """A file of an index cannot be read, or holds something else than was written."""


class StorageError(OSError):
    """A file could not be written; everything that was finished before is still there."""
