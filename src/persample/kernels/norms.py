"""Euclidean norms that neither overflow, underflow nor drift.

A float32 sum of squares is wrong in three ways: elements above 1.8e19 overflow, those below 1e-19 vanish, and sums of
millions of terms lose digits. Short rows are summed in float64 right away. Of longer ones, short runs are summed in the
tensor's own precision, the runs' norms in float64, and rows that came out as 0, inf or nan are looked at again: in
float64, or scaled by their largest element. How a row is summed depends on its own length and numbers alone. Where
numbers cannot be looked at, all rows are summed in float64, or scaled.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from .devices import can_look, has_float64
from .differentiable import is_differentiable

__all__ = ["norms_of_norms", "root", "row_norms", "wide", "widest"]

_RUN = 2**9  # elements summed before float64 takes over
_SMALL = {torch.float32: 1e-12, torch.float64: 1e-150}  # norms below may have lost squares to underflow


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: half precision goes through float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def widest(device: torch.device) -> torch.dtype:
    """The dtype that norms are kept in: float64 where the device has it."""
    return torch.float64 if has_float64(device) else torch.float32


def row_norms(rows: Tensor) -> Tensor:
    """(B, ...) -> (B,): the norm of every row, complex or real.

    >>> row_norms(torch.tensor([[3e30, 4e30], [3e-30, 4e-30], [0.0, 0.0]]))
    tensor([5.0000e+30, 5.0000e-30, 0.0000e+00], dtype=torch.float64)
    """
    if not rows.numel():
        return torch.zeros(rows.shape[0], dtype=widest(rows.device), device=rows.device)
    flat = (torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows).reshape(rows.shape[0], -1)
    dtype = widest(flat.device)
    looks = can_look(flat.device)
    if is_differentiable():  # the norm of a run of zeros has no second derivative
        return _scaled(flat)
    if wide(flat.dtype) != dtype and (flat.shape[1] <= _RUN or not looks):
        return _norm(flat, dtype)  # no square is too large or too small for the wider one
    if not looks:
        return _scaled(flat)
    norms, small = _summed(flat), _SMALL[wide(flat.dtype)]
    low, high = torch.aminmax(norms)
    if low.item() > small and high.item() < inf:  # neither is true of NaN
        return norms
    extreme = (~((norms > small) & norms.isfinite())).nonzero().squeeze(1)
    rows = flat.index_select(0, extreme)
    again = _scaled(rows) if wide(rows.dtype) == norms.dtype else _norm(rows, norms.dtype)
    return norms.index_copy(0, extreme, again)


def norms_of_norms(norms: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, n) -> (B,): `row_norms` of norms of gradients of at most this dtype, whose squares are within float64."""
    return row_norms(norms) if norms.dtype in (dtype, torch.float32) else _norm(norms, norms.dtype)


def root(squares: Tensor) -> Tensor:
    """The root of sums of squares, which rounding may have left below zero.

    Its derivative at zero is zero, as that of PyTorch's norms.
    """
    if not is_differentiable():
        return squares.clamp(min=0).sqrt()
    zero = squares <= 0
    return squares.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def _summed(flat: Tensor) -> Tensor:
    """The norm of every row, from norms of runs in the row's own precision, which are added up in float64."""
    n, dtype, high = flat.shape[1], wide(flat.dtype), widest(flat.device)
    if n <= _RUN or dtype == torch.float64:
        return _norm(flat, dtype).to(high)
    runs = n // _RUN
    parts = _norm(flat[:, : runs * _RUN].unflatten(1, (runs, _RUN)), dtype).to(high)
    if runs * _RUN < n:
        last = _norm(flat[:, runs * _RUN :], dtype).to(high)
        parts = torch.cat([parts, last.unsqueeze(1)], 1)
    return _norm(parts, high)


def _norm(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The norm over the last dim."""
    norm: Tensor = torch.linalg.vector_norm(t, dim=-1, dtype=dtype)
    return norm


def _scaled(flat: Tensor) -> Tensor:
    """The norm of every row, divided by its largest element first, so that no square overflows or vanishes."""
    largest: Tensor = torch.linalg.vector_norm(flat.detach(), inf, dim=1).to(widest(flat.device))
    scale = torch.where((largest > 0) & (largest < inf), largest, 1)  # rows of zeros, infinities and NaNs stay so
    return _summed(flat.to(scale.dtype) / scale.unsqueeze(1)) * scale
