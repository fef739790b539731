"""Reductions: what can be computed from per-sample gradients. A reduction sees factors, never graphs or modules."""

from .base import Call, Reduction
from .clipping import ClippedSum, Clipping
from .moments import SecondMoment, Variance
from .norms import Norms
from .products import Dot, Gram
from .projection import Project, Projection
from .run import Run
from .sums import Stack, WeightedSum

__all__ = [
    "Call",
    "ClippedSum",
    "Clipping",
    "Dot",
    "Gram",
    "Norms",
    "Project",
    "Projection",
    "Reduction",
    "Run",
    "SecondMoment",
    "Stack",
    "Variance",
    "WeightedSum",
]
