"""Matrix functions: inverses, factorisations, solutions of linear systems."""

from __future__ import annotations

from functools import partial

from ..layout import Outcome
from ..read.site import Site
from .dims import keep, leading, of_same_size
from .table import EVERY, Layouts, Undecided, op


def matrices(site: Site, k: int, layouts: Layouts) -> Outcome:
    """The last two dims are a matrix; those in front of them count matrices, and stay."""
    target = site.target(k)
    live = [(shape, layout) for shape, layout in zip(site.shapes, layouts, strict=True) if layout is not None]
    if len(live) != 1 or len(target) < 3:
        raise Undecided
    shape, layout = live[0]
    if not len(target) - 2 <= len(shape) <= len(target):  # a broadcast operand
        raise Undecided
    to_dims = of_same_size(shape, target, leading(shape, len(target) - 2))
    return keep(layout, shape, target, to_dims, len(target))


_matrix = partial(op, flow={EVERY: matrices})

_matrix(
    "LinalgInvEx LinalgSolveEx LinalgCholeskyEx CholeskySolve CholeskyInverse LinalgSolveTriangular LinalgDet"
    " LinalgSlogdet LinalgQr LinalgMatrixExp LinalgPinv LinalgLuFactorEx",
    vmap=True,
)
_matrix("Cholesky TriangularSolve LinalgSvd LinalgEigh")
op("LinalgCross LinalgLu LinalgLuSolve LuUnpack", vmap=True)
