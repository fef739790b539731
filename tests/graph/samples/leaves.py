"""What the samples are made of: small leaf tensors and constants, drawn from torch's own generator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Sample = Callable[[], Tensor]
Samples = dict[str, list[Sample]]


def w(*shape: int) -> Tensor:
    """A parameter."""
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def z(*shape: int) -> Tensor:
    """A complex parameter."""
    return torch.randn(shape, dtype=torch.complex128).requires_grad_()


def p(*shape: int) -> Tensor:
    """A parameter between 0.1 and 0.9, where every function is defined and most are smooth."""
    return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def f(*shape: int) -> Tensor:
    """A parameter in single precision."""
    return torch.randn(shape).requires_grad_()


def c(*shape: int) -> Tensor:
    """A constant."""
    return torch.randn(shape, dtype=torch.float64)


def ids(high: int, *shape: int) -> Tensor:
    """Constant indices."""
    return torch.randint(0, high, shape)


def mask(*shape: int) -> Tensor:
    """A constant mask."""
    return torch.rand(shape) > 0.4


def spd(n: int, *batch: int) -> Tensor:
    """Symmetric, positive definite matrices, computed from a parameter."""
    a = w(*batch, n, n)
    return a @ a.mT + n * torch.eye(n, dtype=torch.float64)
