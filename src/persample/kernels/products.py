"""Sums of outer products over samples and positions, and inner products of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numberless import faking
from .differentiable import is_differentiable
from .norms import row_norms, wide, widest
from .pages import recycled

__all__ = ["inner_products", "sums_of_parts", "sums_of_products", "whole_sums"]


def sums_of_parts(left: Tensor, right: Tensor, parts: int) -> Tensor:
    """(parts, ...): Σ_bt left[b, ..., t] ⊗ right[b, ..., t] over each of so many equal parts of the samples."""
    if parts == 1:
        return sums_of_products(left, right).unsqueeze(0)
    if left.ndim != 3:
        pairs = zip(left.chunk(parts), right.chunk(parts), strict=True) if len(left) else [(left, right)] * parts
        return torch.stack([sums_of_products(a, b) for a, b in pairs])
    rows = len(left) // parts * left.shape[1]
    left, right = (t.reshape(parts, rows, t.shape[-1]) for t in (left, right))
    return torch.bmm(left.mT, right)


def whole_sums(left: Tensor, right: Tensor, parts: int) -> Tensor:
    """`sums_of_parts` of whole numbers, which no order of adding up changes, in memory that is used again."""
    if left.ndim != 3 or faking():
        return sums_of_parts(left, right, parts)
    rows = len(left) // parts * left.shape[1]
    left, right = (t.reshape(parts, rows, t.shape[-1]) for t in (left, right))
    out = recycled((parts, left.shape[-1], right.shape[-1]), left.dtype, left.device)
    return torch.bmm(left.mT, right, out=out)


def sums_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Σ_bt left[b, ..., t] ⊗ right[b, ..., t]."""
    if left.ndim == 3:
        return _all_positions(left, right)
    return torch.einsum("b...tp,b...td->...pd", left, right)


def _all_positions(left: Tensor, right: Tensor) -> Tensor:
    """Σ_bt left[b, t] ⊗ right[b, t] as one product, in the order in which the longer of both lies in memory."""
    larger = max(left, right, key=Tensor.numel)
    if not larger.is_contiguous() and larger.transpose(0, 1).is_contiguous():
        left, right = left.transpose(0, 1), right.transpose(0, 1)
    return left.flatten(0, 1).t() @ right.flatten(0, 1)


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """(N, d), (M, d) -> (N, M) in float64: of unit vectors in their own precision, and scaled, to stay in range."""
    if is_differentiable():  # the norm of a row of zeros has no second derivative
        return a.to(widest(a.device)) @ b.to(widest(b.device)).t()
    (unit_a, long_a), (unit_b, long_b) = _unit(a), _unit(b)
    return (unit_a @ unit_b.t()).to(long_a.dtype) * long_a.unsqueeze(1) * long_b


def _unit(rows: Tensor) -> tuple[Tensor, Tensor]:
    norms = row_norms(rows)
    scale = torch.where(norms > 0, norms, 1)
    return (rows.to(norms.dtype) / scale.unsqueeze(1)).to(wide(rows.dtype)), scale
