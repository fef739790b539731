"""Elementwise ops with broadcasting: the sample stays where it is, or is summed away."""

from __future__ import annotations

from functools import lru_cache

from ..layout import Labels, Shape, carry
from ..names import POINTWISE
from ..site import Fate, Flow, Site
from .registry import Layouts, flow, only


@lru_cache(maxsize=65536)
def broadcast_dims(shape: Shape, target: Shape) -> tuple[int | None, ...]:
    """For every dim of ``shape``, the dim of the broadcast operand ``target`` it came from (None: repeated)."""
    offset = len(shape) - len(target)
    return tuple(d - offset if d >= offset and target[d - offset] == n else None for d, n in enumerate(shape))


@flow(" ".join(POINTWISE))
def pointwise(site: Site, k: int, layouts: Layouts) -> Fate:
    """An operand that was broadcast along the sample dim has a gradient that sums over samples."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    if shape == target:
        return layout
    if len(shape) < len(target):  # a loss that was averaged, or an operand in place: one element for all
        return Flow.PROBE
    found = carry(layout, shape, target, broadcast_dims(shape, target))
    if found is None and isinstance(layout, Labels) and layout.index.numel() == 1:
        return Labels(layout.batch, layout.index.reshape([1] * len(target)))
    return Flow.SHARED if found is None else found
