"""Which examples made the model what it is."""

from .curvature import KFAC, Adam, Covariance, Curvature, Fitted, Identity, Shampoo
from .exact import Solution, dual, exact, fit, solve
from .products import Fisher, GaussNewton, Hessian
from .sampling import categorical, gaussian

__all__ = [
    "KFAC",
    "Adam",
    "Covariance",
    "Curvature",
    "Fisher",
    "Fitted",
    "GaussNewton",
    "Hessian",
    "Identity",
    "Shampoo",
    "Solution",
    "categorical",
    "dual",
    "exact",
    "fit",
    "gaussian",
    "solve",
]
