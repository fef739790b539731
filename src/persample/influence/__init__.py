"""Which examples made the model what it is."""

from .in_run import InRun
from .lds import Counterfactual, DataModelScore, counterfactual, lds
from .replay import Recording, ReplayError, replay
from .select import Selection, select

__all__ = [
    "Counterfactual",
    "DataModelScore",
    "InRun",
    "Recording",
    "ReplayError",
    "Selection",
    "counterfactual",
    "lds",
    "replay",
    "select",
]
