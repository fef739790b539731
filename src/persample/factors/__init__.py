"""A tensor's per-sample gradients, kept in the form they are born in.

Index letters, here and in every rule: B samples, T positions, d in, p out, G groups.
"""

from .base import Factor
from .combine import Sum, View, combine
from .convolution import Convolution
from .deferred import Deferred
from .dense import Dense, Kept, Masked
from .outer import Outer
from .part import Part, bounded_sums, one_by_one, regroup, split
from .rows import Rows
from .workspace import Workspace

__all__ = [
    "Convolution",
    "Deferred",
    "Dense",
    "Factor",
    "Kept",
    "Masked",
    "Outer",
    "Part",
    "Rows",
    "Sum",
    "View",
    "Workspace",
    "bounded_sums",
    "combine",
    "one_by_one",
    "regroup",
    "split",
]
