"""The gradient of every single example, for any PyTorch model, at about the price of one ordinary backward."""

from . import testing
from ._errors import InteractionError, PerformanceWarning, UnsupportedError
from ._version import __version__
from .api import grad
from .explain import Explanation, explain

__all__ = [
    "Explanation",
    "InteractionError",
    "PerformanceWarning",
    "UnsupportedError",
    "__version__",
    "explain",
    "grad",
    "testing",
]
