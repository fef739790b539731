"""Small ops that make every node type of the vmap list, at least one for every name, with the options that matter."""

from .algebra import ALGEBRA
from .leaves import Sample, Samples
from .pointwise import POINTWISE
from .shapes import SHAPES

SAMPLES: Samples = {**POINTWISE, **SHAPES, **ALGEBRA}

__all__ = ["SAMPLES", "Sample", "Samples"]
