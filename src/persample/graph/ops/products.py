"""Matrix products: a weight's gradient is a sum of outer products.

The sample may lie in a free dim, which stays, or in one that a gradient sums over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...factors import Dense, Factor, Outer, View, products_of_parts
from ...factors.maps import left_times, scaled, times_right
from ...factors.rearrange import Reshape
from ...kernels.norms import wide
from ...numberless import read_numbers, with_numbers
from ..layout import Flow, Layout, Outcome, Shape, carry, labels, sample_dims
from ..read.site import Site
from ..sample_rows import SampleRows
from .broadcast import dense
from .dims import by_letters, follow, only, unbroadcast
from .table import EVERY, Aten, Layouts, Product, Rowwise, op
from .use import Use


def _product(names: str, result: str, operands: Mapping[int, str], saved: tuple[str, str], **known: Any) -> None:
    """Enter a product of two operands; whatever else it has is added to it."""
    flows = {0: added, **by_letters(result, operands)}
    op(names, flow=flows, product=Product(result, operands, saved), **known)


def _aten_product(name: str) -> tuple[Aten, ...]:
    """A product a @ b is the backward of others: of a' = a @ bᵀ with cotangent a, and of b' = aᵀ @ b with b."""
    return (
        Aten(name, ("self",), 0, saved={"mat2": lambda get: get("mat2").mT}),
        Aten(name, ("mat2",), 1, saved={"self": lambda get: get("self").mT}),
    )


def added(site: Site, k: int, layouts: Layouts) -> Outcome:
    """The term that is added may have been broadcast."""
    return unbroadcast(only(layouts), site.shapes[0], site.target(k))


def _scalar(use: Use, name: str) -> float | None:
    """A saved alpha or beta as a float; None when it is complex."""
    value = use.site.value(name)
    return None if isinstance(value, complex) else float(value)


def _scaled_bias(use: Use) -> Factor | None:
    """The term that was added to a product: beta · g, broadcast."""
    beta = _scalar(use, "beta")
    if beta is None:
        return None
    return dense(use.g if beta == 1 else use.g * beta, use.layout, use.target)


def mm(use: Use) -> Factor | None:
    """result = a @ b; da = g bᵀ, db = aᵀ g."""
    return _matrix(use, use.k, "self", "mat2", 1.0)


def addmm(use: Use) -> Factor | None:
    """result = beta · bias + alpha · a @ b."""
    if use.k == 0:
        return _scaled_bias(use)
    alpha = _scalar(use, "alpha")
    return None if alpha is None else _matrix(use, use.k - 1, "mat1", "mat2", alpha)


def _matrix(use: Use, operand: int, first: str, second: str, scale: float) -> Factor | None:
    """Outer products over the rows (for the right operand) or the columns (for the left one) of g."""
    g, layout = use.g, use.layout
    if operand == 1:
        samples = SampleRows.of(layout, tuple(g.shape), 1)
        return None if samples is None else samples.products(_conj(use.site.tensor(first)), g, scale)
    samples = _column_rows(layout, g)
    if samples is None:
        return None
    return samples.products(g.t(), _conj(use.site.tensor(second)).t(), scale)


def _conj(t: Tensor) -> Tensor:
    """The gradient of a complex product takes the other operand's conjugate."""
    return t.conj().resolve_conj() if t.is_complex() else t


def _column_rows(layout: Layout, g: Tensor) -> SampleRows | None:
    """The columns of a matrix as rows that belong to samples."""
    flipped = carry(layout, tuple(g.shape), tuple(g.t().shape), (1, 0))
    return None if flipped is None else SampleRows.of(flipped, tuple(g.t().shape), 1)


def bmm(use: Use) -> Factor | None:
    """n products at a time; the sample lies in their rows or columns."""
    return _matrices(use, use.k, "self", "mat2", 1.0)


def baddbmm(use: Use) -> Factor | None:
    """result = beta · bias + alpha · a @ b, n at a time."""
    if use.k == 0:
        return _scaled_bias(use)
    alpha = _scalar(use, "alpha")
    return None if alpha is None else _matrices(use, use.k - 1, "batch1", "batch2", alpha)


def _matrices(use: Use, operand: int, first: str, second: str, scale: float) -> Factor | None:
    """Outer products with a leading dim of n independent products: factors (B, n, T, ·)."""
    order = (0, 1, 2) if operand == 1 else (0, 2, 1)  # bring the contracted dim second: (n, positions, ·)
    g = use.g.permute(order)
    layout = carry(use.layout, tuple(use.g.shape), tuple(g.shape), order)
    if layout is None:
        return None
    other = _conj(use.site.tensor(first if operand == 1 else second)).permute(order)
    return _by_product(layout, tuple(g.shape), (other, g) if operand == 1 else (g, other), scale)


def _by_product(layout: Layout, shape: Shape, sides: tuple[Tensor, Tensor], scale: float) -> Factor | None:
    """Sides (n, positions, ·) as (B, n, T, ·), for a sample that lies in the positions or in both first dims."""
    n = shape[0]
    swapped = carry(layout, shape, (shape[1], n, shape[2]), (1, 0, 2))
    samples = None if swapped is None else SampleRows.of(swapped, (shape[1], n, shape[2]), 1)
    if samples is not None and n == 1:
        rows = [t.squeeze(0) for t in sides]
        return samples.factor(rows, lambda ts: Outer(ts[0].unsqueeze(1), ts[1].unsqueeze(1), scale))
    if samples is not None:
        rows = [t.transpose(0, 1) for t in sides]
        return samples.factor(rows, lambda ts: Outer(ts[0].transpose(1, 2), ts[1].transpose(1, 2), scale))
    owners = _owners_in_products(layout, shape)
    if owners is None:
        return None
    left, right = (t.flatten(0, 1) for t in sides)
    return products_of_parts(left, right, owners, layout.batch, n, scale)


@with_numbers
def _owners_in_products(layout: Layout, shape: Shape) -> Tensor | None:
    """Routed experts: every product has its own rows, each of which is one sample's. Sample · n + product of each."""
    index, n = labels(layout, shape), shape[0]
    if index.shape[2] != 1:
        return None
    index = index.squeeze(2).expand(n, shape[1])
    product = torch.arange(n, device="cpu").unsqueeze(1)
    return torch.where(index < 0, index, index * n + product).reshape(-1)


def grouped_mm(use: Use) -> Factor | None:
    """Experts on sorted rows: row t of a is multiplied by the matrix of its group, which ends at row offs[group]."""
    site, g = use.site, use.g
    ends = site.optional("offs")
    if use.k != 1 or ends is None or g.ndim != 2 or len(use.target) != 3:
        return None
    owners = _owners_in_groups(use.layout, tuple(g.shape), ends)
    return None if owners is None else products_of_parts(site.tensor("self"), g, owners, use.batch, len(ends))


@with_numbers
def _owners_in_groups(layout: Layout, shape: Shape, ends: Tensor) -> Tensor | None:
    """Sorted rows, each of which is one sample's and goes to one of the groups that end where ``ends`` says.

    Sample · groups + group of each.
    """
    index, groups = labels(layout, shape), len(ends)
    if index.shape[1] != 1:
        return None
    group = torch.bucketize(torch.arange(shape[0], device="cpu"), read_numbers(ends).to("cpu", torch.int64), right=True)
    index = index.squeeze(1).expand(shape[0])
    return torch.where((index < 0) | (group >= groups), -1, index * groups + group.clamp(max=groups - 1))


def addbmm(use: Use) -> Factor | None:
    """result = beta · bias + alpha · Σ_n a_n @ b_n: one cotangent for all products."""
    if use.k == 0:
        return _scaled_bias(use)
    alpha = _scalar(use, "alpha")
    order = (0, 1) if use.k == 2 else (1, 0)
    g = use.g.permute(order)
    layout = carry(use.layout, tuple(use.g.shape), tuple(g.shape), order)
    samples = None if layout is None else SampleRows.of(layout, tuple(g.shape), 1)
    if samples is None or alpha is None:
        return None
    other = _conj(use.site.tensor("batch1") if use.k == 2 else use.site.tensor("batch2").mT)

    def products(sides: list[Tensor]) -> Factor:
        x, dy = sides[0].transpose(1, 2), sides[1].unsqueeze(1).expand(-1, len(other), -1, -1)
        return Outer(x, dy, alpha) if use.k == 2 else Outer(dy, x, alpha)

    return samples.factor([other.transpose(0, 1), g], products)


def mv(use: Use) -> Factor | None:
    """result = A @ x for samples in the rows of A: dx = Σ_t g[t] A[t]."""
    return _vector(use, "self", 1.0) if use.k == 1 else None


def addmv(use: Use) -> Factor | None:
    """result = beta · bias + alpha · A @ x for samples in the rows of A."""
    if use.k == 0:
        return _scaled_bias(use)
    alpha = _scalar(use, "alpha")
    return None if alpha is None or use.k == 1 else _vector(use, "mat", alpha)


def _vector(use: Use, matrix: str, scale: float) -> Factor | None:
    samples = use.rows(1)
    if samples is None:
        return None
    dtype = use.g.dtype
    products = use.g.unsqueeze(1).to(wide(dtype)) * _conj(use.site.tensor(matrix)) * scale
    return Dense(samples.sum(products).to(dtype))


def trilinear(use: Use) -> Factor | None:
    """F.bilinear's weight: dW[b, o, i, j] = Σ_t g[b, t, o] x1[b, t, i] x2[b, t, j]."""
    site, g, target = use.site, use.g, use.target
    form = [site.numbers(name) for name in ("expand1", "expand2", "expand3", "sumdim")]
    samples = use.rows(1)
    if use.k != 1 or samples is None or form != [(1, 3), (0,), (1, 2), (2, 3)] or len(target) != 3:
        return None
    x1, x2 = site.tensor("i1"), site.tensor("i3")
    pairs = (x1.unsqueeze(2) * x2.unsqueeze(1)).reshape(len(g), target[1] * target[2])

    def weight(sides: list[Tensor]) -> Factor:
        flat = Outer(sides[0], sides[1])
        return View(flat, target, Reshape(flat.shape, target))

    return samples.factor([g, pairs], weight)


def trilinear_flow(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Operands are expanded to one rank; the dims that an operand has are free, the others are contracted."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    expand, summed = site.numbers(f"expand{k + 1}"), site.numbers("sumdim")
    rank = len(shape) + len(summed)
    own = [d for d in range(rank) if d not in expand]
    left = [d for d in range(rank) if d not in summed]
    moved = follow(layout, shape, target, [own.index(d) if d in own else None for d in left], len(own))
    if moved is not None:
        return moved
    return Flow.SHARED if not any(left[d] in own for d in sample_dims(layout, shape)) else Flow.PROBE


def rows_of_groups(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Rows of one matrix, each multiplied by the matrix of its group."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    moved = follow(layout, shape, target, [0, None], 2) if len(target) == 2 else None
    return Flow.PROBE if moved is None else moved


def matrices_of_groups(site: Site, k: int, layouts: Layouts) -> Outcome:
    """The matrices are shared, if they are weights."""
    only(layouts)
    return Flow.SHARED if site.is_weight(k) else Flow.PROBE


def through_mm(site: Site, k: int, factor: Factor) -> Factor | None:
    """A product of two matrices that all samples share."""
    if k == 0:
        return times_right(factor, site.tensor("mat2").t())
    return left_times(site.tensor("self").t(), factor)


def through_addmm(site: Site, k: int, factor: Factor) -> Factor | None:
    """beta · self + alpha · mat1 @ mat2."""
    number = site.value("alpha" if k else "beta")
    if k == 0:
        passed = factor if site.target(0) == factor.shape else None
    elif k == 1:
        passed = times_right(factor, site.tensor("mat2").t())
    else:
        passed = left_times(site.tensor("mat1").t(), factor)
    if passed is None or number == 1:
        return passed
    return scaled(passed, torch.tensor(number, dtype=factor.dtype, device=factor.device))


def through_mv(site: Site, k: int, factor: Factor) -> Factor | None:
    """A matrix times a vector: the gradient of the matrix is an outer product with that vector."""
    if factor.dtype.is_complex or not isinstance(factor, Dense):
        return None
    vector = site.tensor("vec").to(factor.dtype)
    return Outer(factor.value.unsqueeze(1), vector.expand(factor.batch, 1, -1))


_product(
    "Mm",
    "ij",
    {0: "ik", 1: "kj"},
    ("self", "mat2"),
    aten=_aten_product("mm.default"),
    rule=mm,
    through=dict.fromkeys((0, 1), through_mm),
    rowwise=Rowwise({1: ("self",)}),
    vmap=True,
    shape_follows=True,
    saved_data=("self", 1),
)
_product(
    "Addmm",
    "ij",
    {1: "ik", 2: "kj"},
    ("mat1", "mat2"),
    rule=addmm,
    through=dict.fromkeys((0, 1, 2), through_addmm),
    rowwise=Rowwise({0: (), 2: ("mat1",)}, ("alpha", "beta")),
    vmap=True,
    shape_follows=True,
    saved_data=("mat1", 1),
)
_product("SparseAddmm", "ij", {1: "ik", 2: "kj"}, ("mat1", "mat2"), rule=addmm)
_product(
    "Bmm",
    "nij",
    {0: "nik", 1: "nkj"},
    ("self", "mat2"),
    aten=_aten_product("bmm.default"),
    rule=bmm,
    vmap=True,
    shape_follows=True,
)
_product("Baddbmm", "nij", {1: "nik", 2: "nkj"}, ("batch1", "batch2"), rule=baddbmm, vmap=True)
_product("Addbmm", "ij", {1: "nik", 2: "nkj"}, ("batch1", "batch2"), rule=addbmm, vmap=True)
_product("Mv", "i", {0: "ik", 1: "k"}, ("self", "vec"), rule=mv, vmap=True, through={0: through_mv})
_product("Addmv", "i", {1: "ik", 2: "k"}, ("mat", "vec"), rule=addmv, vmap=True)
_product("Addr", "ij", {1: "i", 2: "j"}, ("vec1", "vec2"), vmap=True)
_product("Dot", "", {0: "k", 1: "k"}, ("self", "tensor"), vmap=True)
_product("Vdot", "", {0: "k", 1: "k"}, ("self", "other"), vmap=True)
op("GroupedMm", flow={0: rows_of_groups, 1: matrices_of_groups}, rule=grouped_mm)
op("Trilinear", flow={EVERY: trilinear_flow}, rule=trilinear)
