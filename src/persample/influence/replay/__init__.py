"""Metagradients of a recorded run: the derivative of a query's loss with respect to each training example's weight."""

from .recording import Recording
from .run import ReplayError, replay

__all__ = ["Recording", "ReplayError", "replay"]
