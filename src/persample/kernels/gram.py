"""Norms of sums of outer products from Gram matrices, without the products.

    ‖Σ_t l_t ⊗ r_t‖² = Σ_tu (l_t · l_u)(r_t · r_u)

costs T²(p + d) multiplications where writing the gradient out costs T·p·d. The terms may cancel, and digits are lost
with them. The rounding error is at most about ε (Σ_t ‖l_t‖‖r_t‖)², which the diagonals give at no extra cost. So it is
known which samples' norms cannot be trusted: the caller computes these from gradients that are written out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .certificates import is_traced
from .norms import root, widest

__all__ = ["BLOCK", "ROWS", "gram_norms", "summed", "terms_in", "trusted_norms"]

BLOCK = 64  # rows of a Gram matrix at a time; what lies below its diagonal blocks is not computed
ROWS = 128  # rows at a time of a Gram matrix of pixels, which is computed in whole lines of an image
_LONG, _RUN = 512, 256  # longer sums than the first are added up in runs of the second, and these in float64
_MOST_KEPT = 256  # rows of the largest Gram matrix that is kept for the next call
_TRUST = {torch.float32: 1e-3, torch.float64: 1e-6}  # share of the terms' size that is left: 4 and 9 digits are right


def gram_norms(
    left: Tensor, right: Tensor, dtype: torch.dtype, memo: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """For left (N, T, p) and right (N, T, d): norms (N,), and which can be trusted for gradients of the given dtype.

    Calls with the same ``left`` may share a ``memo``, which keeps its Gram matrices.
    """
    T = left.shape[1]
    blocks = [_block(left, right, start, memo if T <= _MOST_KEPT else None) for start in range(0, T, BLOCK)]
    squares, size, floored = blocks[0] if len(blocks) == 1 else torch.stack(blocks).sum(0)
    norms, trusted = trusted_norms(squares, size.square(), left.dtype, dtype)
    trusted &= floored - size <= _TRUST[left.dtype] * norms
    if is_traced():
        zero = _is_product_of_nothing(left, right)
        return norms.masked_fill(zero, 0), trusted | zero
    if not bool(trusted.all()):  # perhaps because there is nothing but zeros
        untrusted = (~trusted).nonzero().squeeze(1)
        zero = _is_product_of_nothing(left[untrusted], right[untrusted])
        trusted[untrusted] = zero
        norms[untrusted[zero]] = 0
    return norms, trusted


def _is_product_of_nothing(left: Tensor, right: Tensor) -> Tensor:
    """(N,): is one of both sides nothing but zeros, and the other finite?"""
    a, b = (t.flatten(1).abs().amax(1) for t in (left, right))  # NaN if there is one
    return ((a == 0) & (b < torch.inf)) | ((b == 0) & (a < torch.inf))


def _block(left: Tensor, right: Tensor, start: int, memo: dict[str, Tensor] | None) -> Tensor:
    """(3, N) in float64, for a block of rows: Σ_tu (l_t · l_u)(r_t · r_u), the terms' size, and a bound of that size.

    The size is Σ_t ‖l_t‖‖r_t‖. In the bound, squares so small that digits are lost count as the least that has none.
    """
    least = torch.finfo(left.dtype).tiny / torch.finfo(left.dtype).eps
    a, b = _inner_products(left, start, memo), _inner_products(right, start, None)
    rows = a.shape[1]
    own = torch.stack([a.detach().diagonal(0, 1, 2), b.detach().diagonal(0, 1, 2)])
    sizes = torch.stack([own, own.clamp(min=least)]).sqrt_().prod(1).sum(2)
    products = b.mul_(a)
    sums = torch.cat([summed(products[..., :rows]).unsqueeze(0), sizes.to(widest(left.device))])
    if products.shape[2] > rows:  # what lies right of the diagonal block stands for what lies below it, too
        sums[0] += 2 * summed(products[..., rows:])
    return sums


def summed(products: Tensor) -> Tensor:
    """(N, t, u) -> (N,): all elements of each matrix, added up in float64."""
    return products.sum((1, 2), dtype=widest(products.device))


def _inner_products(side: Tensor, start: int, memo: dict[str, Tensor] | None) -> Tensor:
    """A block of rows of the Gram matrices, from the diagonal on."""
    key = f"gram {start}"
    block = memo.get(key) if memo else None
    if block is None:
        block = _multiplied(side[:, start : start + BLOCK], side[:, start:].mT)
        if memo is not None:
            memo[key] = block
    return block


def _multiplied(rows: Tensor, columns: Tensor) -> Tensor:
    """rows @ columns; long sums are added up in short runs, and these in float64, so that little is rounded."""
    size = rows.shape[2]
    if terms_in(size) == size or rows.dtype == widest(rows.device):
        return torch.bmm(rows, columns)
    total = torch.zeros(*rows.shape[:2], columns.shape[2], dtype=widest(rows.device), device=rows.device)
    for some in range(0, size, _RUN):
        total += torch.bmm(rows[:, :, some : some + _RUN], columns[:, some : some + _RUN])
    return total.to(rows.dtype)


def terms_in(size: int) -> int:
    """How many of a sum's ``size`` products are added up before float64 takes over."""
    return size if size <= _LONG else _RUN


def trusted_norms(squares: Tensor, size: Tensor, computed: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The norms, and which can be trusted: not those whose terms cancelled, vanished or may overflow.

    ``size`` bounds ``squares`` if no terms cancel; ``computed`` is the dtype of the products, ``dtype`` the gradients'.
    """
    info, largest = torch.finfo(computed), torch.finfo(dtype).max
    most = min(info.max, largest * largest)
    trusted = (squares >= _TRUST[computed] * size) & (squares > info.tiny / info.eps) & (size < most)
    return root(squares), trusted
