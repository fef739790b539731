"""Bounds that change from step to step by a schedule, which depends on nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..reductions import ClippedSum
from ..reductions.clipping import Bounds, values_of
from .clips import Clipper, Fixed, check_range, grouped, in_order
from .plan import Plan
from .schedules import checked, factor_at


@dataclass(frozen=True)
class ScheduledClip:
    """A clip whose bounds are multiplied by factors, each for an equal share of the plan's steps.

    The noise of a step is for the bound of that step, so that the plan stays as it is.

    >>> import persample as ps
    >>> from persample import dp
    >>> clip = dp.ScheduledClip(ps.ClippedSum(2.0), (1.0, 0.5))
    >>> clip.schedule
    (1.0, 0.5)

    Args:
        clip: a ``ps.ClippedSum`` with ``max_norm``: flat, per group or automatic.
        schedule: factors that are public: they must not follow from the data. `dp.schedules` makes some.
    """

    clip: ClippedSum
    schedule: Sequence[float]

    def __post_init__(self) -> None:
        if not isinstance(self.clip, ClippedSum):
            raise TypeError(f"a schedule is for a ps.ClippedSum, not for a {type(self.clip).__name__}")
        if self.clip.max_norm is None:
            raise ValueError("a schedule multiplies max_norm, but this clip has weights of its own: use max_norm")
        object.__setattr__(self, "schedule", checked(self.schedule, "schedule"))


class Scheduled(Clipper):
    """The clip of a `ScheduledClip`, step by step."""

    def __init__(self, clip: ScheduledClip, params: Mapping[str, Tensor], plan: Plan) -> None:
        if plan.mechanism != "gaussian":
            raise ValueError(
                f"mechanism={plan.mechanism!r} takes away in later steps what noise an earlier one has added, which "
                f"needs one bound for all of them: use a ps.ClippedSum in place of dp.ScheduledClip, or "
                f"mechanism='gaussian'"
            )
        self._clip, self._params, self._steps = clip, params, plan.length
        self._fixed = Fixed(clip.clip, params)
        check_range([bound * factor for bound in values_of(clip.clip.max_norm) for factor in clip.schedule])
        self.begin(0)

    def begin(self, step: int) -> None:
        factor = factor_at(self._clip.schedule, step, self._steps)
        clip = self._now = copy(self._clip.clip)
        assert clip.max_norm is not None
        clip.max_norm = _scaled(clip.max_norm, factor)
        bounds = in_order(clip.max_norm, grouped(clip.per, self._params))
        self.bound = bounds[0] if clip.per is None else bounds

    @property
    def is_plain(self) -> bool:
        """Is there one bound, and nothing else?"""
        return isinstance(self.bound, float) and self._clip.clip.gamma is None

    def reduction(self) -> ClippedSum:
        return self._now

    def sensitivity(self) -> float:
        return self._now.sensitivity_for(len(self._params))

    def describe(self) -> dict[str, Any]:
        return {**self._fixed.describe(), "kind": "ScheduledClip", "schedule": list(self._clip.schedule)}


def _scaled(bounds: Bounds, factor: float) -> Bounds:
    if isinstance(bounds, Mapping):
        return {key: float(bound * factor) for key, bound in bounds.items()}
    return [float(bound * factor) for bound in bounds] if isinstance(bounds, Sequence) else float(bounds * factor)
