"""Helpers for stacks of gradients: tensors (B, *shape) with one gradient per sample."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..kernels.devices import can_look
from ..kernels.library import copied_at_once
from ..kernels.norms import wide


def real_matrix(stack: Tensor) -> Tensor:
    """(B, ...) as a matrix with B rows of real numbers; a complex number is a pair of them."""
    if stack.is_complex():
        stack = torch.view_as_real(stack.resolve_conj())
    return stack.reshape(len(stack), prod(stack.shape[1:]))


def real_rows(stack: Tensor) -> Tensor:
    """(B, ...) as a matrix with B rows of real numbers, in float32 or wider."""
    if stack.is_complex():
        stack = torch.view_as_real(stack.resolve_conj())
    return stack.to(wide(stack.dtype)).reshape(len(stack), prod(stack.shape[1:]))


def squares(t: Tensor) -> Tensor:
    """|t|², element by element."""
    return (t.abs() if t.is_complex() else t).square()


def copied_to(out: Tensor | None, value: Tensor) -> Tensor:
    """``value``, copied into the buffer ``out`` if there is one."""
    return value if out is None else out.copy_(value)


def separated(totals: Tensor) -> list[Tensor]:
    """The rows of a tensor, in memory of their own."""
    if can_look(totals.device):
        return [total.clone() for total in totals]
    return copied_at_once(totals.unbind())
