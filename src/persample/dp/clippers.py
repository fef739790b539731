"""Which clip of a user is which clipping of a run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..reductions import ClippedSum
from .clips import AdaptiveClip, Clipper, Fixed, Following
from .plan import Plan
from .scheduled import Scheduled, ScheduledClip

Clip = ClippedSum | AdaptiveClip | ScheduledClip


def clipper(clip: Clip, params: Mapping[str, Tensor], plan: Plan) -> Clipper:
    """The `Clipper` of a clip, for the parameters and the plan of a run."""
    if isinstance(clip, AdaptiveClip):
        return Following(clip, plan, params)
    if isinstance(clip, ScheduledClip):
        return Scheduled(clip, params, plan)
    if isinstance(clip, ClippedSum):
        return Fixed(clip, params)
    raise TypeError(
        f"clip must be a ps.ClippedSum, a dp.AdaptiveClip or a dp.ScheduledClip, not a {type(clip).__name__}"
    )


def can_be_compiled(clipper: Clipper) -> bool:
    """Does its bound stay, or is it a single one that moves?"""
    if isinstance(clipper, Scheduled):
        return clipper.is_plain
    return not isinstance(clipper.bound, list)
