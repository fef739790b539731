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

__all__ = ["BLOCK", "ROWS", "gram_norms", "summed", "terms_in", "trusted_norms"]

BLOCK = 64  # rows of a Gram matrix at a time; what lies below its diagonal blocks is not computed
ROWS = 128  # the same for pixels, in whole lines
_LONG, _RUN = 512, 256  # products that are added up in one run, and how long runs of more are
_REMEMBERED = 256  # rows at most of a Gram matrix that is kept
_TRUST = {torch.float32: 1e-3, torch.float64: 1e-6}  # of the terms' size must be left: then 4 and 9 digits are right


def gram_norms(
    left: Tensor, right: Tensor, dtype: torch.dtype, memo: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """For left (N, T, p) and right (N, T, d): norms (N,), and which of them hold for gradients of the given dtype.

    ``memo`` is for calls with the same ``left``.
    """
    T = left.shape[1]
    blocks = [_block(left, right, start, memo if T <= _REMEMBERED else None) for start in range(0, T, BLOCK)]
    squares, size, floored = blocks[0] if len(blocks) == 1 else torch.stack(blocks).sum(0)
    norms, holds = trusted_norms(squares, size.square(), left.dtype, dtype)
    holds &= floored - size <= _TRUST[left.dtype] * norms
    if not bool(holds.all()):  # perhaps because there is nothing but zeros
        doubtful = (~holds).nonzero().squeeze(1)
        a, b = left[doubtful].flatten(1), right[doubtful].flatten(1)
        zero = (~a.any(1) & b.isfinite().all(1)) | (~b.any(1) & a.isfinite().all(1))
        holds[doubtful] = zero
        norms[doubtful[zero]] = 0
    return norms, holds


def _block(left: Tensor, right: Tensor, start: int, memo: dict[str, Tensor] | None) -> Tensor:
    """(3, N) in float64, of some rows: Σ_tu (l_t · l_u)(r_t · r_u), and the terms' size as it is and at least is.

    The size is Σ_t ‖l_t‖‖r_t‖; of squares that are so small that digits are lost, only a bound is known.
    """
    least = torch.finfo(left.dtype).tiny / torch.finfo(left.dtype).eps
    a, b = _inner_products(left, start, memo), _inner_products(right, start, None)
    rows = a.shape[1]
    own = torch.stack([a.diagonal(0, 1, 2), b.diagonal(0, 1, 2)])
    sizes = torch.stack([own, own.clamp(min=least)]).sqrt_().prod(1).sum(2)
    products = b.mul_(a)
    found = torch.cat([summed(products[..., :rows]).unsqueeze(0), sizes.to(widest(left.device))])
    if products.shape[2] > rows:
        found[0] += 2 * summed(products[..., rows:])
    return found


def summed(products: Tensor) -> Tensor:
    """(N, t, u) -> (N,), in float64."""
    return products.sum((1, 2), dtype=widest(products.device))


def _inner_products(side: Tensor, start: int, memo: dict[str, Tensor] | None) -> Tensor:
    """Some rows of the Gram matrices, from the diagonal on."""
    key = f"gram {start}"
    found = memo.get(key) if memo else None
    if found is None:
        found = _in_runs(side[:, start : start + BLOCK], side[:, start:].mT)
        if memo is not None:
            memo[key] = found
    return found


def _in_runs(rows: Tensor, columns: Tensor) -> Tensor:
    """Their products; long sums in short runs, and these in float64, so that little is rounded."""
    size = rows.shape[2]
    if terms_in(size) == size or rows.dtype == widest(rows.device):
        return torch.bmm(rows, columns)
    total = torch.zeros(*rows.shape[:2], columns.shape[2], dtype=widest(rows.device), device=rows.device)
    for some in range(0, size, _RUN):
        total += torch.bmm(rows[:, :, some : some + _RUN], columns[:, some : some + _RUN])
    return total.to(rows.dtype)


def terms_in(size: int) -> int:
    """How many products of so many are added up before float64 takes over."""
    return size if size <= _LONG else _RUN


def trusted_norms(squares: Tensor, size: Tensor, computed: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The norms, and which of them hold: not those whose terms cancelled, vanished or may overflow."""
    info, largest = torch.finfo(computed), torch.finfo(dtype).max
    most = min(info.max, largest * largest)
    holds = (squares >= _TRUST[computed] * size) & (squares > info.tiny / info.eps) & (size < most)
    return squares.clamp(min=0).sqrt(), holds
