"""How a step clips: by a bound that stays, or by one that follows a quantile of the norms."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor

from ..factors.limits import Unit
from ..reductions import Call, ClippedSum, Clipping
from ..reductions.clipping import Bounds, values_of
from ..reductions.groups import Groups, Per, as_groups, listed
from .errors import PrivacyError
from .plan import Plan

_NO_DEVICE = torch.device("cpu")
_RANGE = 1e-30, 1e30  # of bounds that stay: sums, noise and gradients of float32 have room for them
_MOVING = 1e-10, 1e10  # of bounds that follow a quantile
_COUNT_BITS = 20  # of a count's coordinate: the sum of 2**40 samples fits into 64 bits


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """A bound that follows a quantile of the gradients' norms (Andrew et al., 2021).

    After every step the bound moves by ``exp(-rate · (noisy fraction of samples below it - quantile))``. The count is
    released with noise, as one more coordinate of the sum: the plan's noise multiplier covers both, and the gradients
    get a little more noise for it.

    >>> from persample import dp
    >>> dp.AdaptiveClip(initial=1.0, quantile=0.5)
    AdaptiveClip(initial=1.0, quantile=0.5, rate=0.2, count_noise=None, nonfinite='raise', per=None)

    Args:
        initial: the first bound; with groups, that of each, or a list or dict of them. Bounds stay between 1e-10 and
            1e10.
        quantile: the share of the samples that are to stay unclipped.
        rate: how fast the bound moves.
        count_noise: the standard deviation of the noise on the count of unclipped samples; by default a twentieth of
            the batch size, but as much as the plan's noise multiplier at least, times the root of the number of groups.
            Less noise takes more of the budget.
        nonfinite: as in `ps.ClippedSum`.
        per: groups of parameters that have a bound each, as in `ps.ClippedSum`: "parameter", or a list or dict of
            groups. Every group has a count of its own, and all of them are released with the sum.
    """

    initial: Bounds = 1.0
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None
    nonfinite: Literal["raise", "drop"] = "raise"
    per: Per = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "per", as_groups(self.per))
        ClippedSum(self.initial, per=self.per, nonfinite=self.nonfinite)  # its checks
        if not 0 <= self.quantile <= 1:
            raise ValueError(f"quantile must lie between 0 and 1, not {self.quantile!r}")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be positive and finite, not {self.rate!r}")
        if self.count_noise is not None and not 0 < self.count_noise < math.inf:
            raise ValueError(f"count_noise must be positive and finite, not {self.count_noise!r}")


class Clipper(ABC):
    """The clipping of a run, step by step."""

    bound: float | list[float] | None = None  # the current one, where it moves; one for each group, if there are some
    counts = 0  # how many coordinates `count` gives

    def begin(self, step: int) -> None:  # noqa: B027 (for most, there is nothing to do)
        """Set the bound for a step, counted from 0, where a schedule has it."""

    @abstractmethod
    def reduction(self) -> ClippedSum:
        """The clipped sum of this step."""

    @abstractmethod
    def sensitivity(self) -> float:
        """How far one sample can move all that this step releases."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What must stay the same during a run, to be stored and compared."""

    def count(self, clipping: Clipping) -> Tensor | None:
        """Coordinates to be released with the sums, as whole numbers of `counted_in`; or none."""
        return None

    @property
    def counted_in(self) -> Unit | None:
        """The unit of the coordinates that `count` gives, if there are some."""
        return None

    def follow(self, noisy: Tensor) -> None:
        """Move the bound by the noisy values of the coordinates that `count` gives."""
        raise NotImplementedError(f"{type(self).__name__} releases no count")


class Fixed(Clipper):
    """A clipped sum, as it was given."""

    def __init__(self, clip: ClippedSum, params: Mapping[str, Tensor]) -> None:
        self._clip, self._params = clip, params
        self._known: tuple[list[object], dict[str, Any]] = [], {}  # the clip's settings, and how they are described
        if clip.sensitivity_for(len(params)) == math.inf:
            raise ValueError(
                "a ClippedSum with weights has to state its sensitivity, or noise cannot be scaled: "
                "ClippedSum(weights=..., sensitivity=...)"
            )
        check_range(values_of(clip.max_norm) or [self.sensitivity()])

    def reduction(self) -> ClippedSum:
        return self._clip

    def sensitivity(self) -> float:
        return self._clip.sensitivity_for(len(self._params))

    def count(self, clipping: Clipping) -> Tensor | None:
        if self._clip.weights is not None:
            self._check_weights(clipping)
        return None

    def _check_weights(self, clipping: Clipping) -> None:
        """Refuse weights by which a sample could add more than the sensitivity that was stated."""
        norms, weights = (torch.stack(listed(t)).double() for t in (clipping.norms, clipping.weights))
        added = (norms * weights.abs()).nan_to_num(0.0)
        most = math.hypot(*added.amax(1).tolist()) if added.numel() else 0.0
        if most > clipping.sensitivity * (1 + 1e-6):
            raise PrivacyError(
                f"a sample adds {most:.4g} to the sum, more than the sensitivity {clipping.sensitivity:.4g} that was "
                f"stated for the clip's weights: state a larger one, or weigh large gradients down further"
            )

    def describe(self) -> dict[str, Any]:
        facts = list(vars(self._clip).values())
        plain = isinstance(self._clip.max_norm, float) and isinstance(self._clip.per, str | None)  # others may change
        known, described = self._known
        if not plain or len(facts) != len(known) or not all(map(is_, facts, known)):
            described = self._described()
            self._known = facts, described
        return described

    def _described(self) -> dict[str, Any]:
        clip = self._clip
        return {
            "kind": "ClippedSum",
            "max_norm": _copied(clip.max_norm),
            "groups": grouped(clip.per, self._params),
            "gamma": clip.gamma,
            "weights": None
            if clip.weights is None
            else getattr(clip.weights, "__qualname__", type(clip.weights).__name__),
            "sensitivity": self.sensitivity(),
            "nonfinite": clip.nonfinite,
        }


class Following(Clipper):
    """The bounds of an `AdaptiveClip`, one for each of G groups, C their norm.

    The count Σ(b_i - 1/2) of samples below a bound moves by 1/2 with one sample. All counts are released times κ, as
    more coordinates: all coordinates then have noise of std z · hypot(C, √G κ/2), and κ is such that the counts' is
    count_noise. For the gradients alone that is a noise multiplier of (z⁻² - G (2 count_noise)⁻²)^(-1/2).
    """

    def __init__(self, clip: AdaptiveClip, plan: Plan, params: Mapping[str, Tensor] | None = None) -> None:
        if plan.mechanism != "gaussian":
            raise ValueError(
                f"mechanism={plan.mechanism!r} takes away in later steps what noise an earlier one has added, which "
                f"needs one bound for all of them: use a ps.ClippedSum in place of dp.AdaptiveClip, or "
                f"mechanism='gaussian'"
            )
        self._clip, self._plan = clip, plan
        self._groups = grouped(clip.per, params or {})
        bounds = in_order(clip.initial, self._groups)
        check_range(bounds, _MOVING)
        self.bound = bounds[0] if clip.per is None else bounds
        self.counts = len(bounds)
        whole, most = math.sqrt(self.counts), plan.noise * max(plan.noise_schedule or [1.0])
        self.count_noise = clip.count_noise or max(plan.batch_size / 20, most * whole)
        if 2 * self.count_noise <= most * whole:
            raise ValueError(
                f"count_noise {self.count_noise:g} would take the whole budget: it has to be larger than half of the "
                f"plan's noise multiplier{' times the root of the number of groups' * (self.counts > 1)}, "
                f"{most * whole / 2:g}"
            )
        self.begin(0)

    def begin(self, step: int) -> None:
        self._noise = self._plan.noise_at(step)

    @property
    def _bounds(self) -> list[float]:
        assert self.bound is not None
        return self.bound if isinstance(self.bound, list) else [self.bound]

    @property
    def _kappa(self) -> float:
        """By how much more a sample below the bound adds than another: twice a whole number of units."""
        return self._steps * self.counted_in.size * 2

    @property
    def counted_in(self) -> Unit:
        return Unit(math.frexp(self._ideal)[1] - _COUNT_BITS)

    @property
    def _steps(self) -> int:
        return round(self._ideal / self.counted_in.size / 2)

    @property
    def _ideal(self) -> float:
        z = self._noise
        if z == 0:
            return 1.0
        return z * math.hypot(*self._bounds) / math.sqrt(self.count_noise**2 - self.counts * z**2 / 4)

    def reduction(self) -> ClippedSum:
        assert self.bound is not None
        return ClippedSum(self.bound, per=self._clip.per, nonfinite=self._clip.nonfinite)

    def sensitivity(self) -> float:
        return math.hypot(*self._bounds, *[self._kappa / 2] * self.counts)

    def count(self, clipping: Clipping) -> Tensor | None:
        below = [norms <= bound for norms, bound in zip(listed(clipping.norms), self._bounds, strict=True)]
        return torch.stack(below).long().mul_(2).sub_(1).sum(1).mul_(self._steps)

    def follow(self, noisy: Tensor) -> None:
        moved = [self._moved(*pair) for pair in zip(self._bounds, noisy.tolist(), strict=True)]
        self.bound = moved if isinstance(self.bound, list) else moved[0]

    def _moved(self, bound: float, noisy: float) -> float:
        fraction = noisy / self._kappa / self._plan.batch_size + 0.5
        least, most = _MOVING
        furthest = math.log(most / least)  # more than that has no effect, and may be too much for exp
        by = -self._clip.rate * (fraction - self._clip.quantile)
        moved = bound * math.exp(min(max(by, -furthest), furthest))
        return min(max(moved, least), most)

    def describe(self) -> dict[str, Any]:
        clip = self._clip
        initial = in_order(clip.initial, self._groups)
        described = {
            "kind": "AdaptiveClip",
            "initial": initial[0] if clip.per is None else initial,
            "quantile": clip.quantile,
            "rate": clip.rate,
            "count_noise": clip.count_noise,
            "nonfinite": clip.nonfinite,
        }
        return described if clip.per is None else {**described, "groups": self._groups}


def _copied(bounds: Bounds | None) -> dict[str, float] | list[float] | float | None:
    """What stays as it is when the user's list or dict changes."""
    if isinstance(bounds, Mapping):
        return dict(bounds)
    return list(bounds) if isinstance(bounds, Sequence) else bounds


def check_range(bounds: Sequence[float], within: tuple[float, float] = _RANGE) -> None:
    """Refuse bounds that are so small or so large that sums or their noise could vanish or overflow."""
    least, most = within
    if not all(least <= bound <= most for bound in bounds):
        raise ValueError(
            f"bounds of private sums must lie between {least:g} and {most:g}, but these are "
            f"{', '.join(f'{bound:g}' for bound in bounds)}: scale the losses"
        )


def grouped(per: Per, params: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Names of parameters by group, if each of them is in one."""
    groups = Groups.of(per, Call(params, 0, _NO_DEVICE, dict))
    groups.check_partition()
    return {str(key): list(names) for key, names in groups.members.items()}


def in_order(bounds: Bounds, groups: Mapping[str, object]) -> list[float]:
    """One bound for each group, in the order of groups."""
    if isinstance(bounds, Mapping):
        named = {str(key): float(bound) for key, bound in bounds.items()}
        if set(named) != set(groups):
            raise ValueError(f"there must be one bound per group: expected {list(groups)}, got {list(named)}")
        return [named[key] for key in groups]
    found = [float(bound) for bound in bounds] if isinstance(bounds, Sequence) else [float(bounds)] * len(groups)
    if len(found) != len(groups):
        raise ValueError(f"there must be one bound per group: expected {len(groups)}, got {len(found)}")
    return found
