"""A shared matrix whose rows every sample scales: what the norm of a weight's rows adds to the weight's gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.devices import can_look
from ..kernels.differentiable import is_differentiable
from ..kernels.gram import trusted_norms
from ..kernels.norms import row_norms, wide, widest
from .base import Factor, Selection, Shape
from .limits import roundoff
from .outer import Outer
from .stacks import copied_to
from .workspace import Workspace


class ByRows(Factor):
    """gradient[b, i] = scales[b, i] · rows[i], for scales (B, n) and rows (n, *row)."""

    __slots__ = ("rows", "scales")

    def __init__(self, scales: Tensor, rows: Tensor) -> None:
        self.scales, self.rows = scales, rows

    @property
    def batch(self) -> int:
        return len(self.scales)

    @property
    def shape(self) -> Shape:
        return tuple(self.rows.shape)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.scales, self.rows

    @property
    def nbytes(self) -> int:
        return self.scales.nbytes

    def __getitem__(self, samples: Selection) -> ByRows:
        return ByRows(self.scales[samples], self.rows)

    def stack(self, out: Tensor | None = None) -> Tensor:
        scales = self.scales.reshape(self.batch, len(self.rows), *[1] * (self.rows.ndim - 1))
        if is_differentiable():
            return copied_to(out, scales * self.rows)
        return torch.mul(scales, self.rows, out=out)

    def upcast(self, dtype: torch.dtype | None = None) -> Factor:
        dtype = dtype or wide(self.dtype)
        return self if dtype == self.dtype else ByRows(self.scales.to(dtype), self.rows.to(dtype))

    def prefers_stack(self, reused: bool) -> bool:
        return False

    @property
    def may_cancel(self) -> bool:
        return False

    def _compute_norms(self, space: Workspace) -> Tensor:
        """(Σ_i scales[i]² ‖rows[i]‖²)^½, as the norm of a vector of products."""
        return row_norms(self.scales.to(widest(self.device)) * self._norms_of_rows())

    def _norms_of_rows(self) -> Tensor:
        """(n,): in the rows' own precision, if nothing overflows or vanishes in it."""
        short: Tensor = torch.linalg.vector_norm(self.rows.unsqueeze(1).flatten(1), dim=1)
        least, most = torch.finfo(short.dtype).tiny ** 0.25, torch.finfo(short.dtype).max ** 0.25
        if not can_look(self.device) or not bool(((short > least) & (short < most)).all()):
            return row_norms(self.rows)
        return short.to(widest(self.device))

    def rounding_errors(self) -> Tensor:
        return roundoff(self.dtype) * self.cached_norms()

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        dtype = wide(self.dtype)
        scales = weights.to(dtype) @ self.scales.to(dtype)
        return scales.reshape(-1, *[1] * (self.rows.ndim - 1)) * self.rows

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        dtype = wide(self.dtype)
        return self.scales.to(dtype) @ (directions * self.rows).to(dtype).unsqueeze(2).flatten(2).sum(2).t()

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        """Σ_i scales[i] · left[i] ⊗ (rows[i] right)."""
        if len(left) != len(self.rows):
            return super().compress(left, right, space)
        dtype = wide(self.dtype)
        read = self.rows.to(dtype).reshape(len(left), -1) @ right.to(dtype)
        return torch.einsum("bn,nk,nl->bkl", self.scales.to(dtype), left.to(dtype), read)


def beside(terms: Sequence[Factor]) -> tuple[Outer, ByRows] | None:
    """Outer products and scaled rows, if the terms are these two and norms of their sum need not be written out."""
    if len(terms) != 2:
        return None
    outer, rows = terms if isinstance(terms[0], Outer) else reversed(terms)
    if not isinstance(outer, Outer) or not isinstance(rows, ByRows) or outer.left.ndim != 3:
        return None
    if outer.dtype.is_complex or outer.prefers_stack(False):
        return None
    precise = can_look(outer.device) or outer.dtype != widest(outer.device)
    return (outer, rows) if precise else None


def norms_of_both(outer: Outer, rows: ByRows, space: Workspace) -> tuple[Tensor, Tensor]:
    """(B,) each: the norms of outer + rows from both norms and the inner product, and which can be trusted.

    Where numbers cannot be looked at, all have to be: products are in float64 then.
    """
    dtype = wide(outer.dtype) if can_look(outer.device) else widest(outer.device)
    each = (outer.read(rows.rows, dtype) * outer.left).sum(1).mul_(rows.scales)
    inner = each.sum(1, dtype=widest(outer.device)).mul_(outer.scale)
    squares = outer.norms(space).square() + rows.norms(space).square() + 2 * inner
    return trusted_norms(squares, (outer.term_norms() + rows.norms()).square(), wide(outer.dtype), outer.dtype)
