"""Which examples made the model what it is: gradients that are kept on disk and searched, curvature, recorded runs."""

from .checking import Check, Error
from .curvature import KFAC, Adam, Covariance, Curvature, Fitted, Identity, Shampoo
from .exact import Solution, dual, exact, fit, solve
from .index import Index
from .products import Fisher, GaussNewton, Hessian
from .sampling import categorical, gaussian
from .search import Hits
from .sketches import Blocks, Masked, Sketch, Sketched, Sparse
from .store import DamagedError, MismatchError, StorageError

__all__ = [
    "KFAC",
    "Adam",
    "Blocks",
    "Check",
    "Covariance",
    "Curvature",
    "DamagedError",
    "Error",
    "Fisher",
    "Fitted",
    "GaussNewton",
    "Hessian",
    "Hits",
    "Identity",
    "Index",
    "Masked",
    "MismatchError",
    "Shampoo",
    "Sketch",
    "Sketched",
    "Solution",
    "Sparse",
    "StorageError",
    "categorical",
    "dual",
    "exact",
    "fit",
    "gaussian",
    "solve",
]
