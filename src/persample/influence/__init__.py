"""Which examples made the model what it is: sketches of every example's gradient, kept on disk and searched."""

from .checking import Check, Error
from .index import Index
from .search import Hits
from .sketches import Blocks, Masked, Sketch, Sketched, Sparse
from .store import DamagedError, MismatchError, StorageError

__all__ = [
    "Blocks",
    "Check",
    "DamagedError",
    "Error",
    "Hits",
    "Index",
    "Masked",
    "MismatchError",
    "Sketch",
    "Sketched",
    "Sparse",
    "StorageError",
]
