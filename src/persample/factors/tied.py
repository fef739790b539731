"""Norms and inner products for tied embeddings: of a table some rows are read, and it is a matrix in a product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.devices import can_look
from ..kernels.gram import trusted_norms
from ..kernels.norms import wide, widest
from .base import Factor
from .outer import Outer
from .rows import Rows
from .workspace import Workspace


def tied(terms: Sequence[Factor]) -> tuple[Outer, Rows] | None:
    """The two terms of a tied table if they are that, and if `tied_norms` takes less memory than writing them out."""
    if len(terms) != 2:
        return None
    outer, rows = terms if isinstance(terms[0], Outer) else reversed(terms)
    if not isinstance(outer, Outer) or not isinstance(rows, Rows) or outer.left.ndim != 3:
        return None
    if outer.dtype.is_complex or outer.prefers_stack(False) or outer.positions * rows.positions > outer.numel:
        return None
    if not can_look(outer.device) and outer.dtype == widest(outer.device):  # squares keep half of the digits
        return None
    return outer, rows


def tied_norms(outer: Outer, rows: Rows, space: Workspace) -> tuple[Tensor, Tensor]:
    """(B,) each: the norms of outer + rows from both norms and the inner product, and which can be trusted.

    Where numbers cannot be looked at, all have to be: the rows, too, are added up in float64.
    """
    table = rows if can_look(rows.device) else rows.upcast(widest(rows.device))
    squares = outer.norms(space).square() + table.norms(space).square() + 2 * _inner(outer, rows, space)
    return trusted_norms(squares, (outer.term_norms() + rows.term_norms()).square(), wide(outer.dtype), outer.dtype)


def tied_bounds(norms: Tensor, outer: Outer, rows: Rows, space: Workspace | None) -> Tensor:
    """(B,): upper bounds of the ``norms`` that `tied_norms` gives."""
    squares = norms.square()
    for term in (outer, rows):
        known = term.cached_norms(space)
        squares = squares + (term.norm_bounds(space).square() - known.square()) + known.square() * 2.0**-40
    return squares.sqrt() + rows.rounding_errors() + outer.rounding_errors()


def _inner(outer: Outer, rows: Rows, space: Workspace) -> Tensor:
    """(B,): Σ_tu left[b, t, ids[b, u]] · (right[b, t] · dy[b, u]), in float64."""
    dtype, T, U = widest(outer.device), outer.positions, rows.positions
    inner = []
    for some in space.chunks(outer.batch, 2 * T * U * dtype.itemsize):
        ids, dy = rows.ids[some], rows.dy[some].to(dtype)
        picked = outer.left[some].gather(2, ids.clamp(min=0).unsqueeze(1).expand(-1, T, -1)).to(dtype)
        products = torch.bmm(outer.right[some].to(dtype), dy.mT).masked_fill_((ids < 0).unsqueeze(1), 0)
        inner.append(products.mul_(picked).sum((1, 2)))
    return torch.cat(inner).mul_(outer.scale)


_LEAST_SUM = 2**-4  # where the sum of both terms is smaller beside them, their rounding shows in inner products


def tied_gram(mine: tuple[Outer, Rows], theirs: tuple[Outer, Rows], space: Workspace) -> Tensor | None:
    """(B, B'): the inner products of outer + rows with those of others, from four products of terms.

    None where there are several outer products each, or where one of the sums is so small that digits are lost.
    """
    if any(outer.positions != 1 or not outer.batch for outer, _ in (mine, theirs)) or not can_look(mine[0].device):
        return None
    for outer, rows in (mine, theirs):
        norms, _ = tied_norms(outer, rows, space)
        if not bool((norms >= _LEAST_SUM * (outer.term_norms() + rows.term_norms())).all()):
            return None
    dtype = widest(mine[0].device)
    total = mine[0].gram(theirs[0], space).to(dtype) + mine[1].gram(theirs[1], space).to(dtype)
    return total + _cross(mine[0], theirs[1], space) + _cross(theirs[0], mine[1], space).t()


def _cross(outer: Outer, rows: Rows, space: Workspace) -> Tensor:
    """(B, B'): Σ_u left[a, ids[b, u]] · (right[a] · dy[b, u]), in float64, for one outer product of every sample."""
    dtype = widest(outer.device)
    ids, dy = rows.ids.reshape(-1), rows.dy.flatten(0, 1).to(dtype)
    products = []
    for some in space.chunks(outer.batch, 2 * len(ids) * dtype.itemsize):
        picked = outer.left[some].squeeze(1).index_select(1, ids.clamp(min=0)).to(dtype)
        each = outer.right[some].squeeze(1).to(dtype) @ dy.t()
        each = each.mul_(picked).masked_fill_(ids < 0, 0)
        products.append(each.view(-1, rows.batch, rows.positions).sum(2))
    return torch.cat(products).mul_(outer.scale)
