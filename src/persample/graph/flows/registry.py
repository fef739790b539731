"""The table of flow rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..layout import Labels, Layout, Shape, carry
from ..registry import Undecided, or_else, registrar
from ..site import Fate, Flow, Site

Layouts = Sequence[Layout | None]
Rule = Callable[[Site, int, Layouts], Fate]

FLOWS: dict[str, Rule] = {}


_enter = registrar(FLOWS, "flow rule")


def flow(names: str) -> Callable[[Rule], Rule]:
    """Enter a flow rule for these node types; where it is `Undecided`, data decide."""

    def enter(rule: Rule) -> Rule:
        return _enter(names)(or_else(Flow.PROBE, rule))

    return enter


def only(layouts: Layouts) -> Layout:
    """The layout of the first cotangent, which is the only one in use; `Undecided` if it is not.

    Ops with several results have several cotangents as soon as somebody uses the others, as double backwards do with
    the mean and the deviation of a norm.
    """
    first = layouts[0]
    if first is None or any(layout is not None for layout in layouts[1:]):
        raise Undecided
    return first


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
