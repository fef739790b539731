"""Expanded weights outside any recorded module, and the comparison of a function of them with the definition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from persample.expanded import ExpandedWeight
from tests.expanded.helpers import r, squares, total
from tests.reference import assert_same, definition

Shape = tuple[int, ...]
Fn = Callable[..., Tensor]


def expanded(p: Tensor, batch: int = 5, reduction: str = "sum", dim: int = 0, smaller: bool = False) -> ExpandedWeight:
    ew = ExpandedWeight(p, batch, reduction)
    ew.set_batch_first(dim == 0)
    ew.set_allow_smaller_batches(smaller)
    return ew


def check(fn: Fn, x: Tensor, *shapes: Shape, reduction: str = "sum", dim: int = 0) -> None:
    """Per-sample gradients of weights, and the ordinary one of data that want it, are what the definition says."""
    params = [r(*shape, grad=True) for shape in shapes]
    x = x.clone().requires_grad_(x.is_floating_point())
    plain = squares(fn(x, *params), dim)
    want = definition(plain, params)
    weights = [expanded(p, x.shape[dim], reduction, dim) for p in params]
    total(squares(fn(x, *weights), dim), reduction).backward()
    assert_same([p.grad_sample for p in params], want)
    assert all(p.grad is None for p in params)
    if x.requires_grad:
        (dx,) = torch.autograd.grad(total(plain, reduction), x, allow_unused=True)
        if x.grad is None or dx is None:
            assert x.grad is dx
        else:
            torch.testing.assert_close(x.grad, dx, rtol=1e-9, atol=1e-12)
