"""Curvatures: what gradients are divided by, before their inner products say who influenced whom."""

from .adam import Adam
from .base import DAMPING, Curvature, Fitted, load
from .kinds import KFAC, Covariance, Identity, Shampoo

__all__ = ["DAMPING", "KFAC", "Adam", "Covariance", "Curvature", "Fitted", "Identity", "Shampoo", "load"]
