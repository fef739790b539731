"""Factors: the per-sample gradients of a tensor, in the structured form that its op gives them.

The gradient of a linear layer's weight is a sum of outer products, that of an embedding a few rows of a table. A factor
keeps the parts and computes from them what reductions ask for (norms, sums, inner products), without writing all
gradients out. `Factor` in `base` says what every form can do; there is one module per form.

Index letters, here and in every rule: B samples, T positions, d in, p out, G groups.
"""

from . import convolution_ops  # noqa: F401 (which registers them)
from .apart import Apart
from .base import Factor
from .bounded import bounded_sums, terms_are_bounded
from .by_rows import ByRows
from .combine import Sum, View
from .convolution import Convolution
from .deferred import Deferred
from .dense import Dense, DenseCopy, Masked
from .forms import Form, form_of, kind_of, together
from .gather import combine, factors_of_rows, placed, products_of_parts, products_of_rows, rows_read
from .hadamard import Hadamard
from .interleaved import Interleaved, interleave
from .outer import Outer
from .part import Part, one_by_one, regroup, split
from .pulled import Pulled
from .rows import Rows
from .workspace import Workspace

__all__ = [
    "Apart",
    "ByRows",
    "Convolution",
    "Deferred",
    "Dense",
    "DenseCopy",
    "Factor",
    "Form",
    "Hadamard",
    "Interleaved",
    "Masked",
    "Outer",
    "Part",
    "Pulled",
    "Rows",
    "Sum",
    "View",
    "Workspace",
    "bounded_sums",
    "combine",
    "factors_of_rows",
    "form_of",
    "interleave",
    "kind_of",
    "one_by_one",
    "placed",
    "products_of_parts",
    "products_of_rows",
    "regroup",
    "rows_read",
    "split",
    "terms_are_bounded",
    "together",
]
