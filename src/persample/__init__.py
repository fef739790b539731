"""The gradient of every single example, for any PyTorch model, at about the price of one ordinary backward."""

from ._errors import InteractionError, PerformanceWarning, UnsupportedError
from .api import grad

__all__ = ["InteractionError", "PerformanceWarning", "UnsupportedError", "grad"]
