"""Counterparts of `torch.nn`'s functions on gradients."""

from . import grad

__all__ = ["grad"]
