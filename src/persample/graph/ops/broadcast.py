"""Gradients of what was broadcast along the samples: summed per sample where the engine would sum over all."""

from __future__ import annotations

import torch
from torch import Tensor

from ...factors import Dense, Factor
from ..layout import Layout, Shape
from ..sample_rows import sum_per_sample


def dense(value: Tensor, layout: Layout, target: Shape, dtype: torch.dtype | None = None) -> Factor:
    """The factor of a broadcast operand, from its gradient before the sum over broadcast dims.

    An operand of another ``dtype`` has its gradients in it. Sums are computed in the wider of both.
    """
    if dtype is None or dtype == value.dtype:
        return Dense(sum_per_sample(value, layout, target))
    return Dense(sum_per_sample(value.to(torch.promote_types(value.dtype, dtype)), layout, target).to(dtype))
