"""A tensor's per-sample gradients, kept in the form they are born in.

Index letters, here and in every rule: B samples, T positions, d in, p out, G groups.
"""

from .base import Factor
from .combine import Sum, View, combine
from .convolution import Convolution
from .dense import Dense, Masked
from .outer import Outer
from .rows import Rows
from .workspace import Workspace

__all__ = ["Convolution", "Dense", "Factor", "Masked", "Outer", "Rows", "Sum", "View", "Workspace", "combine"]
