"""How gradients with respect to a view of a tensor become gradients with respect to the tensor.

Each rearrangement maps a stack (B, *base) to (B, *shape): it moves or casts elements, or sets them into zeros. All are
linear: the inner product of ``rearrange(g)`` with v is that of g with ``rearrange.adjoint(v)``. Where ``is_lossless``,
no element is lost or changed, so that norms and inner products are those of the base.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .base import Shape


class Rearrangement(ABC):
    """A linear map of gradients that needs no arithmetic; equal ones compare equal."""

    is_lossless = True

    @abstractmethod
    def __call__(self, stack: Tensor) -> Tensor:
        """(B, *base) -> (B, *shape)."""

    @abstractmethod
    def adjoint(self, stack: Tensor) -> Tensor:
        """(k, *shape) -> (k, *base)."""

    def moved_dims(self) -> set[int] | None:
        """The dims that it moves elements along, or out of; None if it changes more than places."""
        return None

    def sides(self, left: Tensor, right: Tensor, shape: Shape) -> tuple[Tensor, Tensor] | None:
        """Matrices l and r with leftᵀ · rearrange(g) · right = lᵀ · g · r for all g; None where there are none.

        The rows of ``left`` are the first dims of this ``shape``, and those of ``right`` the others.
        """
        moved, ndim = self.moved_dims(), len(shape)
        if moved is None:
            return None
        for first in [first for first in range(ndim + 1) if prod(shape[:first]) == len(left)]:
            if moved.isdisjoint(range(first)):
                return left, self._through_adjoint(right, (*[1] * first, *shape[first:]))
            if moved.isdisjoint(range(first, ndim)):
                return self._through_adjoint(left, (*shape[:first], *[1] * (ndim - first))), right
        return None

    def _through_adjoint(self, columns: Tensor, dims: Shape) -> Tensor:
        """(n, k) -> (n', k): each column, seen with these dims, as `adjoint` changes it."""
        moved = self.adjoint(columns.t().reshape(columns.shape[1], *dims))
        return moved.reshape(len(moved), prod(moved.shape[1:])).t()


@dataclass(frozen=True)
class Reshape(Rearrangement):
    """All elements in their order, in another shape."""

    base: Shape
    shape: Shape

    def __call__(self, stack: Tensor) -> Tensor:
        return stack.reshape(len(stack), *self.shape)

    def adjoint(self, stack: Tensor) -> Tensor:
        return stack.reshape(len(stack), *self.base)


@dataclass(frozen=True)
class Permute(Rearrangement):
    """Dim i of the result is dim order[i] of the base."""

    order: tuple[int, ...]

    def __call__(self, stack: Tensor) -> Tensor:
        return stack.permute(0, *[d + 1 for d in self.order])

    def adjoint(self, stack: Tensor) -> Tensor:
        return stack.permute(0, *[self.order.index(d) + 1 for d in range(len(self.order))])

    def moved_dims(self) -> set[int]:
        return {dim for dim, before in enumerate(self.order) if dim != before}


@dataclass(frozen=True)
class Section(Rearrangement):
    """The base is every ``step``-th element from ``start`` to ``stop`` of one dim; the rest is zero."""

    shape: Shape
    dim: int
    start: int
    stop: int
    step: int = 1
    squeezed: bool = False  # the base lacks the dim

    def __call__(self, stack: Tensor) -> Tensor:
        whole = stack.new_zeros(len(stack), *self.shape)
        whole[self._where] = stack.unsqueeze(self.dim + 1) if self.squeezed else stack
        return whole

    def adjoint(self, stack: Tensor) -> Tensor:
        part = stack[self._where]
        return part.squeeze(self.dim + 1) if self.squeezed else part

    def moved_dims(self) -> set[int]:
        return {self.dim}

    @property
    def _where(self) -> tuple[slice, ...]:
        return (slice(None),) * (self.dim + 1) + (slice(self.start, self.stop, self.step),)


@dataclass(frozen=True)
class Flip(Rearrangement):
    """Some dims reversed."""

    dims: tuple[int, ...]

    def __call__(self, stack: Tensor) -> Tensor:
        return stack.flip([d + 1 for d in self.dims])

    adjoint = __call__

    def moved_dims(self) -> set[int]:
        return set(self.dims)


@dataclass(frozen=True)
class Roll(Rearrangement):
    """Elements shifted cyclically along dims, or in flattened gradients if there are none."""

    shifts: tuple[int, ...]
    dims: tuple[int, ...]

    def __call__(self, stack: Tensor) -> Tensor:
        return self._rolled(stack, self.shifts)

    def adjoint(self, stack: Tensor) -> Tensor:
        return self._rolled(stack, tuple(-n for n in self.shifts))

    def moved_dims(self) -> set[int] | None:
        return set(self.dims) or None

    def _rolled(self, stack: Tensor, shifts: tuple[int, ...]) -> Tensor:
        if self.dims:
            return stack.roll(shifts, [d + 1 for d in self.dims])
        return stack.flatten(1).roll(shifts[0], 1).reshape(stack.shape)


@dataclass(frozen=True)
class Cast(Rearrangement):
    """Elements in another dtype."""

    base: torch.dtype
    dtype: torch.dtype

    @property
    def is_lossless(self) -> bool:  # type: ignore[override]
        """Not if the new dtype has a smaller range, or drops imaginary parts."""
        same_field = self.base.is_complex == self.dtype.is_complex
        return same_field and torch.finfo(self.dtype).max >= torch.finfo(self.base).max

    def __call__(self, stack: Tensor) -> Tensor:
        return _real_part(stack, self.dtype).to(self.dtype)

    def adjoint(self, stack: Tensor) -> Tensor:
        return _real_part(stack, self.base)


@dataclass(frozen=True)
class AsComplex(Rearrangement):
    """Pairs of real numbers as complex numbers."""

    dtype: torch.dtype

    def __call__(self, stack: Tensor) -> Tensor:
        return torch.view_as_complex(stack.contiguous())

    def adjoint(self, stack: Tensor) -> Tensor:
        return torch.view_as_real(stack.resolve_conj())


def _real_part(stack: Tensor, dtype: torch.dtype) -> Tensor:
    return stack.real if stack.is_complex() and not dtype.is_complex else stack
