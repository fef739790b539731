"""Rows added up by index."""

from __future__ import annotations

import torch
from torch import Tensor

from .norms import wide

__all__ = ["rows_summed"]


def rows_summed(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """(N, ...) -> (count, ...): Σ_n rows[n] by index[n]; half precision is added up in float32, and rounded once.

    >>> rows_summed(torch.ones(3000, dtype=torch.bfloat16), torch.zeros(3000, dtype=torch.long), 2)
    tensor([3008.,    0.], dtype=torch.bfloat16)
    """
    total = torch.zeros(count, *rows.shape[1:], dtype=wide(rows.dtype), device=rows.device)
    return total.index_add_(0, index, rows.to(total.dtype)).to(rows.dtype)
