"""Gradients of what was broadcast along the samples: summed per sample where the engine would sum over all."""

from __future__ import annotations

from torch import Tensor

from ...factors import Dense, Factor
from ..layout import Layout, Shape
from ..sample_rows import sum_per_sample


def dense(value: Tensor, layout: Layout, target: Shape) -> Factor:
    """The factor of a broadcast operand, from its gradient before the sum over broadcast dims."""
    return Dense(sum_per_sample(value, layout, target))
