"""Norms of sums of outer products from Gram matrices, without the products.

    ‖Σ_t l_t ⊗ r_t‖² = Σ_tu (l_t · l_u)(r_t · r_u)

costs T²(p + d) multiplications where writing the gradient out costs T·p·d. The terms may cancel; then so do the
digits. Rounding is at most about ε (Σ_t ‖l_t‖‖r_t‖)², which the diagonals give for nothing, so it is known for which
samples the digits are not certain: those are for the caller to compute in the plain way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .norms import widest

__all__ = ["ROWS", "gram_norms", "trusted_norms"]

ROWS = 256  # of a Gram matrix at a time
_TRUST = {torch.float32: 1e-3, torch.float64: 1e-6}  # of the terms' size must be left: then 4 and 9 digits are right


def gram_norms(
    left: Tensor, right: Tensor, dtype: torch.dtype, memo: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """For left (N, T, p) and right (N, T, d): norms (N,), and which of them hold for gradients of the given dtype.

    ``memo`` is for calls with the same ``left``.
    """
    n, T = left.shape[:2]
    squares = torch.zeros(n, dtype=widest(left.device), device=left.device)
    size, lost = torch.zeros_like(squares), torch.zeros_like(squares)
    least = torch.finfo(left.dtype).tiny / torch.finfo(left.dtype).eps  # below, digits are lost
    for start in range(0, T, ROWS):
        rows = slice(start, start + ROWS)
        a = memo.get("gram") if memo else None
        if a is None:
            a = torch.bmm(left[:, rows], left.mT)
            if memo is not None and T <= ROWS:
                memo["gram"] = a
        b = torch.bmm(right[:, rows], right.mT)
        own, floored = _sizes(a.diagonal(start, 1, 2), b.diagonal(start, 1, 2), least)
        size += own
        lost += floored - own
        squares += b.mul_(a).sum((1, 2))
    norms, holds = trusted_norms(squares, size.square_(), left.dtype, dtype)
    holds &= lost <= _TRUST[left.dtype] * norms
    if not bool(holds.all()):  # perhaps because there is nothing but zeros
        doubtful = (~holds).nonzero().squeeze(1)
        a, b = left[doubtful].flatten(1), right[doubtful].flatten(1)
        zero = (~a.any(1) & b.isfinite().all(1)) | (~b.any(1) & a.isfinite().all(1))
        holds[doubtful] = zero
        norms[doubtful[zero]] = 0
    return norms, holds


def _sizes(a: Tensor, b: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Σ_t ‖l_t‖‖r_t‖ from squared norms (N, T), and what it would be if those that are too small to tell were not."""
    return (a.sqrt() * b.sqrt()).sum(1), (a.clamp(min=least).sqrt() * b.clamp(min=least).sqrt()).sum(1)


def trusted_norms(squares: Tensor, size: Tensor, computed: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The norms, and which of them hold: not those whose terms cancelled, vanished or may overflow."""
    info, largest = torch.finfo(computed), torch.finfo(dtype).max
    most = min(info.max, largest * largest)
    holds = (squares >= _TRUST[computed] * size) & (squares > info.tiny / info.eps) & (size < most)
    return squares.clamp(min=0).sqrt(), holds
