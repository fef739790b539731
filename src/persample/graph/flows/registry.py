"""The table of flow rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..layout import Labels, Layout, Shape, carry
from ..registry import registrar
from ..site import Fate, Flow, Site

Layouts = Sequence[Layout | None]
Rule = Callable[[Site, int, Layouts], Fate]

FLOWS: dict[str, Rule] = {}


flow = registrar(FLOWS, "flow rule")


def only(layouts: Layouts) -> Layout:
    """The layout of a node with one cotangent in use."""
    found = [layout for layout in layouts if layout is not None]
    if len(found) != 1:
        raise LookupError("expected one cotangent")
    return found[0]


def whole(layouts: Layouts, ndim: int) -> Labels | None:
    """All cotangents are one and the same sample's: so is everything computed from them."""
    first: Labels | None = None
    for layout in layouts:
        if layout is None:
            continue
        if not isinstance(layout, Labels) or layout.index.numel() != 1:
            return None
        if first is not None and int(first.index) != int(layout.index):
            return None
        first = layout
    return Labels(first.batch, first.index.reshape([1] * ndim)) if first is not None else None


def keep(layout: Layout, shape: Shape, target: Shape, to_dims: Sequence[int | None]) -> Fate:
    """Follow the dims that the op leaves alone; where the sample lies in another one, data decide."""
    found = carry(layout, shape, target, to_dims)
    return Flow.PROBE if found is None else found
