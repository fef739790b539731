"""Linear maps of gradients that keep their form: from those of a computed weight to those of what it is computed from.

    dC = Σ_t l_t ⊗ r_t,  C = A B:    dA = dC Bᵀ = Σ_t l_t ⊗ (B r_t),    dB = Aᵀ dC = Σ_t (Aᵀ l_t) ⊗ r_t

A number, or one for every row or column, goes into one of the sides. Each function returns None for a factor of which
nothing shorter is known than to write it out.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from ..kernels.convolution import convolve
from ..kernels.devices import can_look
from ..numberless import has_numbers
from .base import Factor, Shape
from .by_rows import ByRows
from .combine import Sum, View
from .convolution import Convolution
from .dense import Dense
from .hadamard import Hadamard
from .outer import Outer
from .rearrange import Permute, Reshape
from .rows import Rows

_FEW, _MANY = 2.0**-40, 2.0**40  # float32 and bfloat16 have three times that range in either direction

__all__ = ["are_moderate", "inner_with", "left_times", "scaled", "times_right", "transposed"]


def scaled(factor: Factor, by: Tensor) -> Factor | None:
    """Every gradient times ``by``, which can be broadcast to its shape."""
    if factor.dtype.is_complex or by.is_complex():
        return None
    by = by.to(factor.dtype).reshape([1] * (len(factor.shape) - by.ndim) + list(by.shape))
    return _scaled(factor, by)


def _scaled(factor: Factor, by: Tensor) -> Factor | None:
    """`scaled` by a tensor of as many dims as gradients have."""
    if isinstance(factor, Sum):
        return _each(factor, lambda term: _scaled(term, by))
    if isinstance(factor, Dense):
        return Dense(factor.value * by)
    if not are_moderate(by):  # gradients are, where the parts that they are made of would not be
        return Hadamard(factor, by.expand(factor.shape))
    if isinstance(factor, Outer):
        return _scaled_products(factor, by)
    if isinstance(factor, ByRows):
        return ByRows(factor.scales, factor.rows * by)
    if isinstance(factor, Rows):
        return Rows(factor.ids, factor.dy * _row_scales(factor, by), factor.size, skips=factor.skips)
    if isinstance(factor, Convolution):
        return _scaled_kernels(factor, by)
    if isinstance(factor, Hadamard):
        return Hadamard(factor.base, factor.by * by)
    if isinstance(factor, View) and (inside := _before(factor, by)) is not None:
        base = _scaled(factor.base, inside)
        return None if base is None else View(base, factor.shape, factor.rearrange)
    return Hadamard(factor, by.expand(factor.shape))


def are_moderate(numbers: Tensor) -> bool:
    """Can these be multiplied into one side of a product? Far from one, what has to do with no sample could overflow.

    Zeros may be; numbers that cannot be looked at are taken to be.
    """
    if not can_look(numbers.device) or not has_numbers(numbers):
        return True
    sizes = numbers.detach().abs()
    return bool(((sizes >= _FEW) & (sizes <= _MANY) | (sizes == 0)).all())


def _each(factor: Sum, change: Callable[[Factor], Factor | None]) -> Factor | None:
    terms = [new for term in factor.terms if (new := change(term)) is not None]
    return Sum(terms) if len(terms) == len(factor.terms) else None


def _scaled_products(factor: Outer, by: Tensor) -> Factor:
    """Numbers, rows and columns; all else is applied to what is written out."""
    if by.shape[-1] == 1:
        return factor.scaled(by.mT, None)
    if by.shape[-2] == 1:
        return factor.scaled(None, by)
    return Hadamard(factor, by.expand(factor.shape))


def _row_scales(factor: Rows, by: Tensor) -> Tensor:
    """What the cotangents of the rows that were read are multiplied by."""
    return by[0] if len(by) == 1 else by[factor.ids.clamp(min=0)]


def _scaled_kernels(factor: Convolution, by: Tensor) -> Factor:
    """Numbers for channels out go to cotangents, and for channels in to inputs."""
    geometry, space = factor.geometry, [1] * (len(factor.size) - 2)
    first, second = by.shape[:2]
    if prod(by.shape[2:]) == 1 and (second == 1 or (first == 1 and geometry.groups == 1)):
        of_first = second == 1  # the weight's first dim: channels out, or in if it is transposed
        channels = by.reshape(1, 1, -1, *space)
        if of_first != geometry.transposed or by.numel() == 1:
            return Convolution(factor.x, factor.dy * channels, factor.size, geometry)
        return Convolution(factor.x * channels, factor.dy, factor.size, geometry)
    return Hadamard(factor, by.expand(factor.shape))


def _before(view: View, by: Tensor) -> Tensor | None:
    """What gradients are to be multiplied by before they are rearranged; None where that is not known."""
    rearrange = view.rearrange
    if isinstance(rearrange, Permute):
        return rearrange.adjoint(by.unsqueeze(0)).squeeze(0)
    if not isinstance(rearrange, Reshape):
        return None
    base = rearrange.base
    if by.numel() == 1:
        return by.reshape([1] * len(base))
    if by.numel() == by.shape[0] == (base[0] if base else 0):
        return by.reshape(-1, *[1] * (len(base) - 1))
    return by.expand(view.shape).reshape(base)


def times_right(factor: Factor, matrix: Tensor) -> Factor | None:
    """Every gradient (p, d) times ``matrix`` (d, r)."""
    if isinstance(factor, Sum):
        return _each(factor, lambda term: times_right(term, matrix))
    if not _fits(factor, matrix):
        return None
    if (flipped := _flipped(factor)) is not None:
        return _transposed(left_times(matrix.t(), flipped))
    matrix = matrix.to(factor.dtype)
    if isinstance(factor, Dense):
        return Dense(factor.value @ matrix)
    if isinstance(factor, Outer) and factor.left.ndim == 3:
        return Outer(factor.left, factor.right @ matrix, factor.scale)
    if isinstance(factor, ByRows):
        return ByRows(factor.scales, factor.rows @ matrix)
    if isinstance(factor, Rows):
        return Rows(factor.ids, factor.dy @ matrix, factor.size, skips=factor.skips)
    if matrix.numel() and (kernels := _kernels(factor)) is not None:
        filters = matrix.t().reshape(-1, *kernels.size[1:])
        read = convolve(kernels.x, filters, kernels.geometry)
        return Outer(_positions(kernels.dy), _positions(read))
    return None


def left_times(matrix: Tensor, factor: Factor) -> Factor | None:
    """``matrix`` (r, p) times every gradient (p, d)."""
    if isinstance(factor, Sum):
        return _each(factor, lambda term: left_times(matrix, term))
    if not _fits(factor, matrix):
        return None
    if (flipped := _flipped(factor)) is not None:
        return _transposed(times_right(flipped, matrix.t()))
    matrix = matrix.to(factor.dtype)
    if isinstance(factor, Dense):
        return Dense(matrix @ factor.value)
    if isinstance(factor, Outer) and factor.left.ndim == 3:
        return Outer(factor.left @ matrix.t(), factor.right, factor.scale)
    if isinstance(factor, ByRows):
        mixed = (matrix * factor.scales.unsqueeze(1)).flatten(0, 1) @ factor.rows
        return Dense(mixed.reshape(factor.batch, len(matrix), factor.shape[1]))
    if isinstance(factor, Rows):
        read, dy = matrix.t()[factor.ids.clamp(min=0)], factor.dy
        if factor.skips:  # and what was skipped may be infinite
            read, dy = (t.masked_fill((factor.ids < 0).unsqueeze(2), 0) for t in (read, dy))
        return Outer(read, dy)
    if matrix.numel() and (kernels := _kernels(factor)) is not None:
        mixed = torch.einsum("rp,bnp...->bnr...", matrix, kernels.dy)
        size: Shape = (len(matrix), *kernels.size[1:])
        shape: Shape = (len(matrix), prod(size[1:]))
        return View(Convolution(kernels.x, mixed, size, kernels.geometry), shape, Reshape(size, shape))
    return None


def _fits(factor: Factor, matrix: Tensor) -> bool:
    """Are these real matrices?"""
    return len(factor.shape) == matrix.ndim == 2 and not factor.dtype.is_complex and not matrix.is_complex()


def _flipped(factor: Factor) -> Factor | None:
    """The factor that this one is the transpose of, if it is one."""
    return factor.base if isinstance(factor, View) and factor.rearrange == Permute((1, 0)) else None


def transposed(factor: Factor) -> Factor:
    """Every gradient, a matrix, transposed."""
    if isinstance(factor, Outer) and factor.left.ndim == 3:
        return factor.t()
    if (flipped := _flipped(factor)) is not None:
        return flipped
    p, d = factor.shape
    return View(factor, (d, p), Permute((1, 0)))


def _transposed(factor: Factor | None) -> Factor | None:
    return None if factor is None else transposed(factor)


def _kernels(factor: Factor) -> Convolution | None:
    """The convolution behind gradients that are seen as matrices with a row for each channel out."""
    base = factor.base if isinstance(factor, View) and isinstance(factor.rearrange, Reshape) else None
    if not isinstance(base, Convolution) or base.geometry.groups != 1 or base.geometry.transposed:
        return None
    return base if factor.shape == (base.size[0], prod(base.size[1:])) else None


def _positions(images: Tensor) -> Tensor:
    """(B, R, C, *S) -> (B, T, C)."""
    return images.flatten(3).transpose(2, 3).flatten(1, 2)


def inner_with(factor: Factor, other: Tensor, target: Shape) -> Factor | None:
    """Gradients times ``other``, of their shape, summed over the dims that are missing or of size one in ``target``."""
    if isinstance(factor, Sum):
        return _each(factor, lambda term: inner_with(term, other, target))
    if factor.dtype.is_complex or other.is_complex():
        return None
    if isinstance(factor, Hadamard):
        return inner_with(factor.base, factor.by * other, target)
    if prod(target) == 1:
        return Dense(factor.dot(other.expand(factor.shape).unsqueeze(0)).reshape(-1, *target).to(factor.dtype))
    kept: Shape = (1,) * (len(factor.shape) - len(target)) + target
    sums = _sums_of_products(factor, other.expand(factor.shape).to(factor.dtype), kept)
    return None if sums is None else View(sums, target, Reshape(kept, target))


def _sums_of_products(factor: Factor, other: Tensor, kept: Shape) -> Factor | None:
    """`inner_with`, of gradients of some forms, where only the first or only the last dims are kept."""
    first, last = kept[1:] == (1,) * (len(kept) - 1), kept[:1] == (1,) and kept[1:] == factor.shape[1:]
    if isinstance(factor, Outer) and factor.left.ndim == 3:
        if first:
            return Dense((factor.left * factor.read(other)).sum(1).mul_(factor.scale).unsqueeze(2))
        if last:
            return Dense((factor.right * factor.t().read(other.t())).sum(1).mul_(factor.scale).unsqueeze(1))
    if isinstance(factor, Rows) and (first or last):
        products = factor.dy * other[factor.ids.clamp(min=0)]
        if first:
            each = products.flatten(2).sum(2).reshape(*factor.ids.shape, *kept[1:])
            return Rows(factor.ids, each, factor.size, skips=factor.skips)
        if factor.skips:
            products = products.masked_fill((factor.ids < 0).reshape(*factor.ids.shape, *[1] * (products.ndim - 2)), 0)
        return Dense(products.sum(1).unsqueeze(1))
    if isinstance(factor, Convolution) and first and not factor.geometry.transposed:
        each = (factor.dy * convolve(factor.x, other, factor.geometry)).flatten(3).sum(3).sum(1)
        return Dense(each.reshape(factor.batch, *kept))
    return None
