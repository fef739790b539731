"""Derivatives of derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def differentiable_twice() -> Iterator[None]:
    """Without the fused operations whose derivatives have no derivative: attention as products of matrices."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
