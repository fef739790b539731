"""Second moments of gradients seen as matrices: Σ_b G_b G_bᵀ (left), Σ_b G_bᵀ G_b (right), and squares in other bases.

A gradient (n, ...) is a matrix n x m, a scalar or a vector one with a single column; a complex number is two columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.norms import wide, widest
from .stacks import real_rows

if TYPE_CHECKING:
    from .base import Factor
    from .outer import Outer
    from .workspace import Workspace

Sides = tuple[Tensor | None, Tensor | None]


def matrix_shape(factor: Factor) -> tuple[int, int]:
    """(n, m): the rows and columns of a gradient."""
    n = factor.shape[0] if factor.shape else 1
    return n, prod(factor.shape[1:]) * (2 if factor.dtype.is_complex else 1)


def empty_moments(factor: Factor, left: bool, right: bool) -> Sides:
    """Zeros (n, n) and (m, m), in float32 or wider, for each that is wanted."""
    wanted = zip(matrix_shape(factor), (left, right), strict=True)
    dtype = wide(factor.dtype).to_real()
    sides = [torch.zeros(k, k, dtype=dtype, device=factor.device) if want else None for k, want in wanted]
    return sides[0], sides[1]


def added(mine: Sides, more: Sides) -> Sides:
    """The sums of both, written into the first."""
    for total, part in zip(mine, more, strict=True):
        if total is not None and part is not None:
            total += part
    return mine


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of at least one."""
    return reduce(torch.add, tensors)


def moments_from_stacks(factor: Factor, left: bool, right: bool, space: Workspace) -> Sides:
    """Both moments from gradients that are written out, a few samples at a time."""
    total = empty_moments(factor, left, right)
    n, m = matrix_shape(factor)
    for _, stack in factor.stacks(space):
        matrices = real_rows(stack).reshape(len(stack), n, m)
        if total[0] is not None:
            rows = matrices.squeeze(2).t() if m == 1 else matrices.transpose(0, 1).reshape(n, len(stack) * m)
            total[0].addmm_(rows, rows.t())
        if total[1] is not None:
            columns = matrices.reshape(len(stack) * n, m)
            total[1].addmm_(columns.t(), columns)
    return total


def squares_from_stacks(factor: Factor, left: Tensor | None, right: Tensor | None, space: Workspace) -> Tensor:
    """Σ_b (leftᵀ G_b right)², from gradients that are written out; None is a side that stays as it is."""
    (n, m), dtype = matrix_shape(factor), wide(factor.dtype).to_real()
    total = torch.zeros(
        n if left is None else left.shape[1],
        m if right is None else right.shape[1],
        dtype=dtype,
        device=factor.device,
    )
    for _, stack in factor.stacks(space):
        matrices = real_rows(stack).reshape(len(stack), n, m)
        matrices = matrices if right is None else matrices @ right.to(dtype)
        if left is None:
            total += matrices.square().sum(0)
            continue
        columns = matrices.transpose(0, 1).reshape(n, len(stack) * total.shape[1])  # one product reads ``left`` once
        total += (left.to(dtype).t() @ columns).square_().reshape(len(total), len(stack), total.shape[1]).sum(1)
    return total


def moments_of_products(outer: Outer, left: bool, right: bool, space: Workspace) -> Sides | None:
    """Both moments of G_b = Σ_t l_t ⊗ r_t: Σ_b lᵀ(r rᵀ)l and Σ_b rᵀ(l lᵀ)r; None where writing G out costs less."""
    if outer.left.ndim != 3 or outer.dtype.is_complex or not outer.positions:
        return None
    T, p, d = outer.positions, outer.left.shape[-1], outer.right.shape[-1]
    by_gram = T * (T * (p + d) * (left + right) + p * p * left + d * d * right)
    if by_gram > p * d * (T + p * left + d * right):
        return None
    total, dtype = empty_moments(outer, left, right), wide(outer.dtype)
    for some in space.chunks(outer.batch, T * (T + 2 * p + 2 * d) * dtype.itemsize):
        a, b = outer.left[some].to(dtype) * outer.scale, outer.right[some].to(dtype)
        if total[0] is not None:
            total[0].addmm_(a.flatten(0, 1).t(), _mixed(b, a).flatten(0, 1))
        if total[1] is not None:
            total[1].addmm_(b.flatten(0, 1).t(), _mixed(a, b).flatten(0, 1))
    return total


def _mixed(by: Tensor, of: Tensor) -> Tensor:
    """(B, T, k): (by byᵀ) of, whose first product is a number for one position."""
    if by.shape[1] == 1:
        return of * by.square().sum(2, keepdim=True)
    return torch.bmm(torch.bmm(by, by.mT), of)


def rotated_products(outer: Outer, left: Tensor | None, right: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The sides of leftᵀ G right, in float32 or wider; None for forms that have no two sides."""
    if outer.left.ndim != 3 or outer.dtype.is_complex:
        return None
    dtype = widest(outer.device) if outer.dtype == torch.float64 else wide(outer.dtype)
    sides = outer.left.to(dtype) * outer.scale, outer.right.to(dtype)
    turned = [t if q is None else t @ q.to(dtype) for t, q in zip(sides, (left, right), strict=True)]
    return turned[0], turned[1]
