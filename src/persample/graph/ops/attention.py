"""Fused attention: batch and head dims are left alone."""

from __future__ import annotations

from functools import partial

from ..layout import Outcome
from ..read.site import Site
from .dims import keep, leading, of_same_size, only
from .table import Aten, Layouts, Undecided, always, op


def attention(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Batch and heads stay, of keys and values as long as they have as many heads as queries."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    if len(shape) != len(target):
        raise Undecided
    return keep(layout, shape, target, of_same_size(shape, target, leading(shape, 2)))


_attention = partial(
    op,
    flow={0: attention, 1: attention, 2: attention},
    once=always("compute it inside torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"),
)

_attention(
    "ScaledDotProductFlashAttentionForCpu",
    aten=(Aten("_scaled_dot_product_flash_attention_for_cpu_backward.default", ("grad_out",), None),),
)
_attention(
    "ScaledDotProductFlashAttention ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention"
    " ScaledDotProductFusedAttentionOverrideable"
)
