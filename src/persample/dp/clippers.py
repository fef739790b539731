"""Which clip of a user is which clipping of a run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..reductions import ClippedSum
from .clips import AdaptiveClip, Clipper, Fixed, Following
from .plan import Plan
from .scheduled import Scheduled, ScheduledClip
from .team import Team

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


def check_can_be_compiled(losses_fn: object, plan: Plan, team: Team, clipper: Clipper) -> None:
    """Refuse what compiled steps do not do, if there is something to compile."""
    if losses_fn is None:
        return
    if team.size > 1 or team.lockstep:
        raise ValueError("compile= is for one process: leave it out where several train together")
    if plan.users is not None:
        raise ValueError("compile= is for plans that protect examples: leave it out where users are protected")
    if not (clipper.is_plain if isinstance(clipper, Scheduled) else not isinstance(clipper.bound, list)):
        raise ValueError(
            "compile= is for clips whose bounds stay, and for single bounds that move: use a ps.ClippedSum, "
            "dp.AdaptiveClip without per=, or dp.ScheduledClip of a flat ps.ClippedSum; or leave compile= out"
        )
