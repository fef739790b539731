"""The gradient of every single example, for any PyTorch model, at about the price of one ordinary backward."""

from . import _releases as _releases  # first: an old PyTorch is refused here, not where something of it is missing

# isort: split
from . import expanded, nn, testing
from ._errors import InteractionError, NonFiniteError, PerformanceWarning, UnsupportedError
from ._version import __version__
from .call import call_for_per_sample_grads
from .compiled import CompiledStep, compile
from .explain import Explanation, explain
from .factors import Factor
from .kernels.pages import empty_cache
from .monitor import Monitor
from .reductions import (
    Call,
    ClippedSum,
    Clipping,
    Dot,
    Gram,
    Norms,
    Project,
    Projection,
    Reduction,
    SecondMoment,
    Stack,
    Variance,
    WeightedSum,
)
from .shortcuts import clipped_sum, dot, gram, jacobian, norms, project, second_moment, variance
from .verbs import backward, grad, reduce

__all__ = [
    "Call",
    "ClippedSum",
    "Clipping",
    "CompiledStep",
    "Dot",
    "Explanation",
    "Factor",
    "Gram",
    "InteractionError",
    "Monitor",
    "NonFiniteError",
    "Norms",
    "PerformanceWarning",
    "Project",
    "Projection",
    "Reduction",
    "SecondMoment",
    "Stack",
    "UnsupportedError",
    "Variance",
    "WeightedSum",
    "__version__",
    "backward",
    "call_for_per_sample_grads",
    "clipped_sum",
    "compile",
    "dot",
    "empty_cache",
    "expanded",
    "explain",
    "grad",
    "gram",
    "jacobian",
    "nn",
    "norms",
    "project",
    "reduce",
    "second_moment",
    "testing",
    "variance",
]
