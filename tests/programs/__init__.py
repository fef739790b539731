"""Random programs made of the ops that networks are made of."""

from . import interactions, layers, products, routing, views
from .program import OPS, Program, random_losses

__all__ = ["OPS", "Program", "interactions", "layers", "products", "random_losses", "routing", "views"]
