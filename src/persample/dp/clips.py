"""How a step clips: by a bound that stays, or by one that follows a quantile of the norms."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor

from ..factors.limits import Unit
from ..reductions import Call, ClippedSum, Clipping
from ..reductions.groups import Groups, listed
from .errors import PrivacyError
from .plan import Plan

_NO_DEVICE = torch.device("cpu")
_COUNT_BITS = 20  # of a count's coordinate: the sum of 2**40 samples fits into 64 bits


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """A bound that follows a quantile of the gradients' norms (Andrew et al., 2021).

    After every step the bound moves by ``exp(-rate · (noisy fraction of samples below it - quantile))``. The count is
    released with noise, as one more coordinate of the sum: the plan's noise multiplier covers both, and the gradients
    get a little more noise for it.

    >>> from persample import dp
    >>> dp.AdaptiveClip(initial=1.0, quantile=0.5)
    AdaptiveClip(initial=1.0, quantile=0.5, rate=0.2, count_noise=None, nonfinite='raise')

    Args:
        initial: the first bound.
        quantile: the share of the samples that are to stay unclipped.
        rate: how fast the bound moves.
        count_noise: the standard deviation of the noise on the count of unclipped samples; by default a twentieth of
            the batch size, but as much as the plan's noise multiplier at least. Less noise takes more of the budget.
        nonfinite: as in `ps.ClippedSum`.
    """

    initial: float = 1.0
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None
    nonfinite: Literal["raise", "drop"] = "raise"

    def __post_init__(self) -> None:
        ClippedSum(self.initial, nonfinite=self.nonfinite)  # its checks
        if not 0 <= self.quantile <= 1:
            raise ValueError(f"quantile must lie between 0 and 1, not {self.quantile!r}")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be positive and finite, not {self.rate!r}")
        if self.count_noise is not None and not 0 < self.count_noise < math.inf:
            raise ValueError(f"count_noise must be positive and finite, not {self.count_noise!r}")


Clip = ClippedSum | AdaptiveClip


class Clipper(ABC):
    """The clipping of a run, step by step."""

    bound: float | None = None  # the current one, where it moves

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
        """One more coordinate to be released with the sums, as a whole number of `counted_in`; or none."""
        return None

    @property
    def counted_in(self) -> Unit | None:
        """The unit of the coordinate that `count` gives, if there is one."""
        return None

    def follow(self, noisy: Tensor) -> None:
        """Move the bound by the noisy value of the coordinate that `count` gives."""
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
        groups = Groups.of(clip.per, Call(self._params, 0, _NO_DEVICE, dict))
        groups.check_partition()
        return {
            "kind": "ClippedSum",
            "max_norm": list(clip.max_norm) if isinstance(clip.max_norm, tuple) else clip.max_norm,
            "groups": {str(key): list(names) for key, names in groups.members.items()},
            "gamma": clip.gamma,
            "weights": None
            if clip.weights is None
            else getattr(clip.weights, "__qualname__", type(clip.weights).__name__),
            "sensitivity": self.sensitivity(),
            "nonfinite": clip.nonfinite,
        }


class Following(Clipper):
    """The bound of an `AdaptiveClip`.

    The count Σ(b_i - 1/2) of samples below the bound moves by 1/2 with one sample. It is released times κ as one more
    coordinate: all coordinates then have noise of std z · hypot(C, κ/2), and κ is such that the count's is count_noise.
    For the gradients alone that is a noise multiplier of (z⁻² - (2 count_noise)⁻²)^(-1/2).
    """

    bound: float

    def __init__(self, clip: AdaptiveClip, plan: Plan) -> None:
        if plan.mechanism != "gaussian":
            raise ValueError(
                f"mechanism={plan.mechanism!r} takes away in later steps what noise an earlier one has added, which "
                f"needs one bound for all of them: use a ps.ClippedSum in place of dp.AdaptiveClip, or "
                f"mechanism='gaussian'"
            )
        self._clip, self._plan, self.bound = clip, plan, clip.initial
        self.count_noise = clip.count_noise or max(plan.batch_size / 20, plan.noise)
        if 2 * self.count_noise <= plan.noise:
            raise ValueError(
                f"count_noise {self.count_noise:g} would take the whole budget: it has to be larger than half of the "
                f"plan's noise multiplier, {plan.noise / 2:g}"
            )

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
        z = self._plan.noise
        if z == 0:
            return 1.0
        return z * self.bound / math.sqrt(self.count_noise**2 - z**2 / 4)

    def reduction(self) -> ClippedSum:
        return ClippedSum(self.bound, nonfinite=self._clip.nonfinite)

    def sensitivity(self) -> float:
        return math.hypot(self.bound, self._kappa / 2)

    def count(self, clipping: Clipping) -> Tensor | None:
        norms: Tensor = clipping.norms
        return (norms <= self.bound).long().mul_(2).sub_(1).sum().mul_(self._steps).reshape(1)

    def follow(self, noisy: Tensor) -> None:
        fraction = float(noisy) / self._kappa / self._plan.batch_size + 0.5
        moved = self.bound * math.exp(-self._clip.rate * (fraction - self._clip.quantile))
        self.bound = min(max(moved, 1e-10), 1e10)

    def describe(self) -> dict[str, Any]:
        return {"kind": "AdaptiveClip", **asdict(self._clip)}


def clipper(clip: Clip, params: Mapping[str, Tensor], plan: Plan) -> Clipper:
    """The `Clipper` of a clip, for the parameters and the plan of a run."""
    if isinstance(clip, AdaptiveClip):
        return Following(clip, plan)
    if isinstance(clip, ClippedSum):
        return Fixed(clip, params)
    raise TypeError(f"clip must be a ps.ClippedSum or a dp.AdaptiveClip, not a {type(clip).__name__}")
