"""Running recorded calls of modules again on fewer samples: do outputs depend on which other samples are there?"""

from .calls import CallRecorder, RecordedCall
from .compare import Comparison, compare_with_fewer_samples, rounding_tolerance

__all__ = ["CallRecorder", "Comparison", "RecordedCall", "compare_with_fewer_samples", "rounding_tolerance"]
