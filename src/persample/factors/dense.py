"""Gradients that are written out already: one tensor for every sample, or one whose elements samples divide up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeGuard

import torch
from torch import Tensor

from ..kernels.certificates import usual_size
from ..kernels.devices import can_look, launches_cost
from ..kernels.differentiable import detached_by_default
from ..kernels.library import copied_at_once
from ..kernels.norms import root, row_norms, wide, widest
from .base import Factor, Selection, Shape
from .precise import precise_stacks, recompute_cancelled
from .stacks import copied_to, real_matrix, real_rows, separated
from .workspace import Workspace

_SMALL = 2**22  # bytes: an accelerator copies them in the time of a launch or two


class Dense(Factor):
    """value (B, *shape): scales and shifts of norms, biases, broadcast parameters, whatever was pulled back."""

    __slots__ = ("value",)
    may_cancel = False

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @classmethod
    def of_one(cls, gradient: Tensor) -> Dense:
        """The gradient of a batch of one sample."""
        dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
        return cls(detached_by_default(dense).unsqueeze(0))

    @property
    def batch(self) -> int:
        return len(self.value)

    @property
    def shape(self) -> Shape:
        return tuple(self.value.shape[1:])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.value,)

    def __getitem__(self, samples: Selection) -> Dense:
        return Dense(self.value[samples])

    def stack(self, out: Tensor | None = None) -> Tensor:
        return copied_to(out, self.value)

    def stacks(self, space: Workspace) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self.batch), self.value

    def elements(self, start: int, stop: int) -> Tensor | None:
        return None if self.dtype.is_complex else self.value.reshape(self.batch, self.numel)[:, start:stop]

    def add_to(self, out: Tensor) -> None:
        out += self.value

    def prefers_stack(self, reused: bool) -> bool:
        return False

    def _compute_norms(self, space: Workspace) -> Tensor:
        return row_norms(self.value)

    def cache_batch_independent_norms(self, space: Workspace) -> None:
        self.cached_norms(space)

    def rounding_errors(self) -> Tensor:
        return torch.zeros_like(self.cached_norms())

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        if self.dtype.is_complex:
            return super().weighted_sum(weights, space)
        rows = real_rows(self.value)
        return (weights.to(rows.dtype).unsqueeze(0) @ rows).view(self.shape)

    def weighted_sums_of_parts(self, count: int, weights: Tensor, space: Workspace) -> Sequence[Tensor]:
        """One batched product for all parts."""
        if self.dtype.is_complex:
            return super().weighted_sums_of_parts(count, weights, space)
        rows = real_rows(self.value).view(count, len(weights), self.numel)
        sums = weights.to(rows.dtype).expand(count, 1, len(weights)) @ rows
        return separated(sums.view(count, *self.shape))


@dataclass(frozen=True)
class SmallStacks:
    """The gradients of several small parameters, side by side: one kernel does for all of them."""

    rows: Tensor  # (B, n), real
    shapes: Sequence[Shape]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.rows.device

    def weighted_sums(self, weights: Tensor) -> list[Tensor]:
        """Σ_b weights[b] · gradient[b] of every parameter, in its dtype and in memory of its own."""
        total = (weights.unsqueeze(0) @ self.rows.to(weights.dtype)).squeeze(0).to(self.dtype)
        sums = copied_at_once(total.split([prod(shape) for shape in self.shapes]))
        return [each.view(shape) for each, shape in zip(sums, self.shapes, strict=True)]


def is_small_stack(factor: Factor) -> TypeGuard[Dense]:
    """Are these gradients written out, and copied sooner than asked one by one?"""
    return type(factor) is Dense and usual_size(factor.value.nbytes, factor.batch) <= _SMALL


def is_worth_writing_out(factor: Factor) -> bool:
    """Is a stack so small, on a device where launches are what costs, that others like it make it free?"""
    small = launches_cost(factor.device) and usual_size(factor.stack_bytes, factor.batch) <= _SMALL
    return small and factor.batch > 0 and type(factor) is not Dense


def small_stacks(factors: Mapping[str, Factor]) -> Iterator[tuple[list[str], SmallStacks]]:
    """The real ones among the gradients for which `is_small_stack` holds, by dtype and device."""
    alike: dict[object, list[str]] = {}
    for name, factor in factors.items():
        if is_small_stack(factor) and not factor.dtype.is_complex:
            alike.setdefault((factor.dtype, factor.device), []).append(name)
    for names in alike.values():
        if len(names) > 1:
            rows = torch.cat([real_matrix(factors[name].stack()) for name in names], 1)
            yield names, SmallStacks(rows, [factors[name].shape for name in names], rows.dtype)


class DenseCopy(Dense):
    """The gradients of another factor, written out, with bounds (B,) of the rounding errors that they contain."""

    __slots__ = ("errors",)

    def __init__(self, value: Tensor, errors: Tensor) -> None:
        super().__init__(value)
        self.errors = errors

    @classmethod
    def of(cls, factor: Factor, out: Tensor, space: Workspace) -> DenseCopy:
        """Write the gradients of ``factor`` into ``out``, in float32 or wider."""
        copy = cls(out, factor.rounding_errors())
        if out.dtype == factor.dtype:
            factor.stack(out)
            if factor.may_cancel and factor.batch and factor.numel:
                copy._norms = recompute_cancelled(factor, out)
        else:
            for some, stack in precise_stacks(factor, space):
                out[some] = stack
        return copy

    def __getitem__(self, samples: Selection) -> DenseCopy:
        return DenseCopy(self.value[samples], self.errors[samples])

    def rounding_errors(self) -> Tensor:
        return self.errors


class Masked(Factor):
    """Elements that belong to one sample each: gradient b is value (*shape) where index == b, and 0 elsewhere.

    Elements with index -1 belong to no sample. The index may have any shape that broadcasts to that of the value.
    """

    __slots__ = ("_batch", "index", "value")
    may_cancel = False

    def __init__(self, value: Tensor, index: Tensor, batch: int) -> None:
        self.value, self.index, self._batch = value, index.to(value.device, non_blocking=True), batch

    @property
    def batch(self) -> int:
        return self._batch

    @property
    def shape(self) -> Shape:
        return tuple(self.value.shape)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.value,)

    def __getitem__(self, samples: Selection) -> Masked:
        chosen = torch.arange(self._batch, device=self.device)[samples]
        place = torch.full((self._batch + 1,), -1, device=self.device)  # index -1, which is no sample, picks the last
        place[chosen] = torch.arange(len(chosen), device=self.device)
        return Masked(self.value, place[self.index], len(chosen))

    def stack(self, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = self.value.new_empty(self._batch, *self.value.shape)
        if self.index.numel() == 1 and can_look(self.device):
            out.zero_()
            if (sample := int(self.index)) >= 0:
                out[sample] = self.value
            return out
        samples = torch.arange(self._batch, device=self.value.device)
        owned = self.index.unsqueeze(0) == samples.reshape(-1, *[1] * self.value.ndim)
        return out.copy_(self.value.unsqueeze(0).expand_as(out)).masked_fill_(~owned, 0)

    def add_to(self, out: Tensor) -> None:
        if self.index.numel() == 1 and can_look(self.device):
            if (sample := int(self.index)) >= 0:
                out[sample] += self.value
        else:
            out += self.stack()

    def prefers_stack(self, reused: bool) -> bool:
        return False

    def cache_batch_independent_norms(self, space: Workspace) -> None:
        self.cached_norms(space)

    def rounding_errors(self) -> Tensor:
        return torch.zeros_like(self.cached_norms())

    def _per_sample(self, values: Tensor) -> Tensor:
        """(*shape) -> (B,): the sum over the elements of every sample."""
        index = self.index.expand(self.shape).reshape(-1)
        sums = values.new_zeros(self._batch + 1)
        return sums.index_add_(0, torch.where(index < 0, self._batch, index), values.reshape(-1))[: self._batch]

    def _compute_norms(self, space: Workspace) -> Tensor:
        size = self.value.abs().to(widest(self.device))
        index = self.index.expand(self.shape).reshape(-1)
        largest = size.new_zeros(self._batch + 1)
        largest.scatter_reduce_(0, torch.where(index < 0, self._batch, index), size.detach().reshape(-1), "amax")
        scale = torch.where((largest > 0) & largest.isfinite(), largest, 1)
        # By squares of the numbers themselves: that of |z| has no second derivative at zero.
        parts = torch.view_as_real(self.value.resolve_conj()) if self.value.is_complex() else self.value.unsqueeze(-1)
        each = (parts.to(size.dtype) / scale[self.index].unsqueeze(-1)).square().sum(-1)
        return root(self._per_sample(each)) * scale[: self._batch]

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        dtype = wide(self.dtype)
        each = torch.cat([weights, weights.new_zeros(1)]).to(dtype.to_real())[self.index]
        return torch.where(self.index < 0, 0, self.value.to(dtype) * each)

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        value = self.value.to(wide(self.dtype))
        if value.is_complex():
            return super().dot(directions, space)
        products = [self._per_sample(value * v.to(value.dtype)) for v in directions]
        return torch.stack(products, 1) if products else value.new_zeros(self._batch, 0)
