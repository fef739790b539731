"""The folder on disk: chunks, `index.json`, fingerprints, atomic writes. It knows nothing of models or sketches."""

from .encoding import Dtype, Encoding
from .errors import DamagedError, MismatchError, StorageError
from .folder import Chunk, Folder, OpenChunk, Plan

__all__ = [
    "Chunk",
    "DamagedError",
    "Dtype",
    "Encoding",
    "Folder",
    "MismatchError",
    "OpenChunk",
    "Plan",
    "StorageError",
]
