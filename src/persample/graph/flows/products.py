"""Matrix products: the sample may lie in a free dim, which stays, or in a contracted one, which is summed."""

from __future__ import annotations

from ..layout import carry, sample_dims
from ..site import Fate, Flow, Site
from .pointwise import broadcast_dims
from .registry import Layouts, flow, only

# For every op and backward output: the dims of the cotangent as letters, and those of the operand.
# n: batch of matrices, i: rows of the result, j: its columns, k: the dim contracted in the forward product.
LETTERS: dict[str, tuple[str, dict[int, str]]] = {
    "Mm": ("ij", {0: "ik", 1: "kj"}),
    "Addmm": ("ij", {1: "ik", 2: "kj"}),
    "SparseAddmm": ("ij", {1: "ik", 2: "kj"}),
    "Bmm": ("nij", {0: "nik", 1: "nkj"}),
    "Baddbmm": ("nij", {1: "nik", 2: "nkj"}),
    "Addbmm": ("ij", {1: "nik", 2: "nkj"}),
    "Mv": ("i", {0: "ik", 1: "k"}),
    "Addmv": ("i", {1: "ik", 2: "k"}),
    "Addr": ("ij", {1: "i", 2: "j"}),
    "Dot": ("", {0: "k", 1: "k"}),
    "Vdot": ("", {0: "k", 1: "k"}),
}


@flow(" ".join(LETTERS))
def product(site: Site, k: int, layouts: Layouts) -> Fate:
    """A free dim carries the sample over; contracting it gives a sum over samples, or what the data say."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    letters, operands = LETTERS[site.name]
    if k not in operands:  # the added term is broadcast
        found = carry(layout, shape, target, broadcast_dims(shape, target))
        return Flow.SHARED if found is None else found
    operand = operands[k]
    found = carry(layout, shape, target, [operand.find(c) if c in operand else None for c in letters])
    if found is not None:
        return found
    return Flow.SHARED if site.is_weight(k) else Flow.PROBE


@flow("Trilinear")
def trilinear(site: Site, k: int, layouts: Layouts) -> Fate:
    """Operands are expanded to one rank; the dims that an operand has are free, the others are contracted."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    rank = len(shape) + len(site.numbers("sumdim"))
    expand = site.numbers(f"expand{k + 1}")
    sumdim = site.numbers("sumdim")
    own = [d for d in range(rank) if d not in expand]
    left = [d for d in range(rank) if d not in sumdim]
    if len(own) != len(target) or len(left) != len(shape):
        return Flow.PROBE
    found = carry(layout, shape, target, [own.index(d) if d in own else None for d in left])
    if found is not None:
        return found
    return Flow.SHARED if not any(left[d] in own for d in sample_dims(layout, shape)) else Flow.PROBE


@flow("GroupedMm")
def grouped_mm(site: Site, k: int, layouts: Layouts) -> Fate:
    """Rows of one matrix, each multiplied by the matrix of its group."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    found = carry(layout, shape, target, [0, None]) if k == 0 and len(target) == 2 else None
    if found is not None:
        return found
    return Flow.SHARED if k == 1 and site.is_weight(k) else Flow.PROBE
