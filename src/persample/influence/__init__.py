"""Which examples made the model what it is: gradients that are kept on disk and searched, curvature, recorded runs."""

from .checking import Check, Error
from .curvature import KFAC, Adam, Covariance, Curvature, Fitted, Identity, Shampoo
from .exact import Solution, dual, exact, fit, solve
from .in_run import InRun
from .index import Index
from .lds import Counterfactual, DataModelScore, counterfactual, lds
from .page import hits_page
from .products import Fisher, GaussNewton, Hessian
from .replay import Recording, ReplayError, replay
from .sampling import categorical, gaussian
from .search import Hits
from .select import Selection, select
from .sketches import Blocks, Masked, Sketch, Sketched, Sparse
from .store import DamagedError, MismatchError, StorageError

__all__ = [
    "KFAC",
    "Adam",
    "Blocks",
    "Check",
    "Counterfactual",
    "Covariance",
    "Curvature",
    "DamagedError",
    "DataModelScore",
    "Error",
    "Fisher",
    "Fitted",
    "GaussNewton",
    "Hessian",
    "Hits",
    "Identity",
    "InRun",
    "Index",
    "Masked",
    "MismatchError",
    "Recording",
    "ReplayError",
    "Selection",
    "Shampoo",
    "Sketch",
    "Sketched",
    "Solution",
    "Sparse",
    "StorageError",
    "categorical",
    "counterfactual",
    "dual",
    "exact",
    "fit",
    "gaussian",
    "hits_page",
    "lds",
    "replay",
    "select",
    "solve",
]
