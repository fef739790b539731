"""Gradients written out such that rounding does not show: not in half precision, nor where large terms cancel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.certificates import certify, is_traced
from ..kernels.devices import can_look, has_fast_float64, launches_cost
from ..kernels.norms import row_norms, wide
from .workspace import Workspace

if TYPE_CHECKING:
    from .base import Factor

_CANCELLATION = 128  # where terms are so many times larger than their sum, their rounding shows in it


def precise_stacks(factor: Factor, space: Workspace) -> Iterator[tuple[slice, Tensor]]:
    """`Factor.stacks` in float32 or wider, computed in float64 for the samples whose terms cancel."""
    if wide(factor.dtype) == factor.dtype:
        stacks = factor.stacks(space)
    else:
        each = factor.numel * wide(factor.dtype).itemsize
        stacks = ((some, factor[some].upcast().stack()) for some in space.chunks(factor.batch, each))
    for some, stack in stacks:
        if factor.may_cancel and stack.dtype in (torch.float32, torch.complex64):
            recompute_cancelled(factor[some], stack)
        yield some, stack


def recompute_cancelled(factor: Factor, stack: Tensor) -> Tensor:
    """Overwrite those gradients in ``stack`` whose terms cancel with results of float64. (B,): the norms.

    Where looking for them costs more than float64, all are overwritten. A graph says which they are.
    """
    if is_traced() and not launches_cost(stack.device):
        norms = row_norms(stack)
        certify(factor.term_norms() <= _CANCELLATION * norms, "large terms cancel")
        return norms
    if not can_look(stack.device) and has_fast_float64(stack.device):
        return row_norms(stack.copy_(factor.upcast(torch.float64).stack()))
    norms = row_norms(stack)
    cancelled = (factor.term_norms() > _CANCELLATION * norms).nonzero().squeeze(1)
    if cancelled.numel():
        stack[cancelled] = factor[cancelled].upcast(torch.float64).stack().to(stack.dtype)
        norms[cancelled] = row_norms(stack[cancelled])
    return norms
