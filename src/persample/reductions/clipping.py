"""Clipped sums: weighted sums of gradients to which no sample adds more than a bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._errors import NonFiniteError
from ..factors import Factor, bounded_sums, terms_are_bounded
from ..factors.base import Selection
from ..factors.bounded import SMALLEST_WEIGHT
from ..kernels.certificates import certify
from ..kernels.devices import can_look, looking
from ..kernels.differentiable import detached_by_default, is_differentiable
from ..numberless import has_numbers
from .base import Call, Reduction
from .groups import Groups, Per, as_groups
from .norms import ParameterNorms
from .sums import added

Bounds = float | Sequence[float] | Mapping[str, float]
Weights = Callable[[Tensor], Tensor]

LARGEST_WEIGHT = 1e30  # larger ones would not survive float32


class _Pair(NamedTuple):
    norms: Any
    weights: Any


class Clipping(_Pair):
    """What a clipped sum did to each sample: ``norms`` before, and the ``weights`` that were given.

    Both have the shape of the losses; with ``per``, they come in the form in which ``ps.norms(..., per=...)`` gives
    norms. ``dropped`` lists the samples that were left out because their gradients are not finite (with several losses
    per sample, the index of each such loss), and ``sensitivity`` is the largest norm that one loss can have added.
    """

    dropped: Sequence[Any] = ()
    sensitivity: float = math.inf

    def __new__(cls, norms: Any, weights: Any, dropped: Sequence[Any] = (), sensitivity: float = math.inf) -> Clipping:
        pair = super().__new__(cls, norms, weights)
        pair.dropped, pair.sensitivity = dropped, sensitivity
        return pair

    def __repr__(self) -> str:
        return (
            f"Clipping(norms={self.norms}, weights={self.weights}, dropped={self.dropped}, "
            f"sensitivity={self.sensitivity})"
        )


class ClippedDict(dict[str, Tensor]):
    """Clipped sums by parameter name, and how they were clipped."""

    clipping: Clipping


class ClippedTuple(tuple[Tensor, ...]):
    """Clipped sums in the parameters' order, and how they were clipped."""

    clipping: Clipping


class ClippedSum(Reduction):
    """Σ_i w_i · gradient i with weights that bound what one sample can add: w_i = min(1, max_norm / ‖gradient i‖).

    Args:
        max_norm: the bound C. With ``per``, one for all groups, or one for each: a list for a list of groups, a
            dict by name for "parameter" or a dict of groups.
        per: what is clipped together: None for everything, "parameter", or groups that hold every parameter once,
            as for `Norms`.
        gamma: normalise instead of clipping ("automatic clipping"): w_i = max_norm / (‖gradient i‖ + gamma).
        weights: any function from norms (B,) to weights (B,) instead; state its ``sensitivity`` if it has one. With
            several losses per sample it is given the norms of all losses at once, in the order of ``losses.flatten()``.
        sensitivity: what one sample adds at most, for ``weights``.
        nonfinite: "raise" names the samples whose gradients are infinite or NaN; with "drop" they add exactly zero
            and are listed in ``result.clipping.dropped``.
    """

    passes = 2
    keeps_factors = True
    over_ranks = True

    def __init__(
        self,
        max_norm: Bounds | None = None,
        *,
        per: Per = None,
        gamma: float | None = None,
        weights: Weights | None = None,
        sensitivity: float | None = None,
        nonfinite: Literal["raise", "drop"] = "raise",
    ) -> None:
        self.max_norm, self.gamma, self.weights = max_norm, gamma, weights
        self.per, self.nonfinite, self._stated_sensitivity = as_groups(per), nonfinite, sensitivity
        self._check_weights()
        if nonfinite not in ("raise", "drop"):
            raise ValueError(f"nonfinite must be 'raise' or 'drop', not {nonfinite!r}")
        self._check_bounds()

    def _check_weights(self) -> None:
        """Weights come from one source, and a sensitivity is stated only where it does not follow."""
        stated = self._stated_sensitivity
        if self.weights is None:
            if self.max_norm is None:
                raise ValueError("a clipped sum needs max_norm, or a function for weights")
            if stated is not None:
                raise ValueError("sensitivity follows from max_norm; it can only be stated for a function of weights")
        elif self.max_norm is not None or self.gamma is not None:
            raise ValueError("give either weights, or max_norm and gamma")
        elif not callable(self.weights):
            raise TypeError("weights must be a function from norms to weights; for given weights use ps.WeightedSum")
        if stated is not None and not _is_positive(stated):
            raise ValueError(f"sensitivity must be positive and finite, not {stated!r}")

    def _check_bounds(self) -> None:
        """Bounds and gamma are positive, finite numbers."""
        bounds = values_of(self.max_norm)
        if any(isinstance(bound, Tensor) for bound in bounds):
            raise TypeError("max_norm must be a Python number, not a tensor: use .item()")
        if self.max_norm is not None and not (bounds and all(map(_is_positive, bounds))):
            raise ValueError(f"max_norm must be positive and finite, not {self.max_norm!r}")
        if self.gamma is not None and not (_is_positive(self.gamma) and max(bounds) / self.gamma < LARGEST_WEIGHT):
            raise ValueError(f"gamma must be positive, finite and not vanishing beside max_norm, not {self.gamma!r}")

    @property
    def in_portions(self) -> bool:  # type: ignore[override]
        """Every loss is clipped by itself; but a function for weights may look at all norms."""
        return self.weights is None

    @property
    def sensitivity(self) -> float:
        """The largest norm that one sample can add to the sum, up to rounding; inf if ``weights`` states none.

        With one bound for several groups it depends on how many there are: see `sensitivity_for`.
        """
        if self.weights is not None:
            return math.inf if self._stated_sensitivity is None else self._stated_sensitivity
        if self.per is None or isinstance(self.max_norm, (Sequence, Mapping)):
            return math.hypot(*values_of(self.max_norm))
        if isinstance(self.per, str):
            raise ValueError("one bound for every parameter: use sensitivity_for(count), with the number of parameters")
        assert self.max_norm is not None
        return self.max_norm * math.sqrt(len(self.per))

    def sensitivity_for(self, count: int) -> float:
        """The `sensitivity` for ``count`` parameters, on which it depends with one bound and ``per="parameter"``.

        Sums state theirs as ``result.clipping.sensitivity``.
        """
        if self.weights is None and self.per == "parameter" and isinstance(self.max_norm, (int, float)):
            return self.max_norm * math.sqrt(count)
        return self.sensitivity

    def start(self, call: Call) -> None:
        self._groups, self._norms = Groups.of(self.per, call), ParameterNorms(call)
        self._groups.check_partition()
        self._bounds = self._bounds_by_group()
        self._factors: dict[str, Factor] = {}

    def add(self, name: str, factor: Factor) -> None:
        self._norms.add(name, factor)
        self._factors[name] = factor

    def result(self) -> Any:
        return self._packed(*self.clip(), self._groups.call)

    def _packed(self, clipping: Clipping, sums: Mapping[str, Tensor], call: Call) -> ClippedDict | ClippedTuple:
        packed = call.pack_sums(call.over_ranks(sums))
        clipped = ClippedDict(packed) if isinstance(packed, dict) else ClippedTuple(packed)
        clipped.clipping = clipping
        return clipped

    def portion(self) -> tuple[Clipping, dict[str, Tensor]]:
        """How every loss of this portion was clipped, by its index in all of them, and the sums."""
        clipping, sums = self.clip()
        call = self._groups.call
        dropped = [call.index_of(i) for i in clipping.dropped]
        return Clipping(clipping.norms, clipping.weights, dropped, clipping.sensitivity), sums

    def condense(self, portions: list[Any]) -> list[Any]:
        (first, _), *others = portions
        return [(first, added([sums for _, sums in portions])), *[(clipping, {}) for clipping, _ in others]]

    def join(self, portions: Sequence[Any], call: Call) -> Any:
        return self._packed(*self.joined(portions, call), call)

    def joined(self, portions: Sequence[Any], call: Call) -> tuple[Clipping, dict[str, Tensor]]:
        """`clip` of all portions of a call."""
        clippings, sums = zip(*portions, strict=True)
        norms, weights = (call.rows([clipping[i] for clipping in clippings]) for i in (0, 1))
        dropped = sorted([loss for clipping in clippings for loss in clipping.dropped])
        return Clipping(norms, weights, dropped, clippings[0].sensitivity), added(sums)

    def clip(self) -> tuple[Clipping, dict[str, Tensor]]:
        """How every sample was clipped, and the sums of this process for the parameters that its losses reach."""
        norms = self._norms.by_group(self._groups)
        if not can_look(self._groups.call.device):
            return self._clip_without_looking(norms)
        kept = self._select_finite(norms)
        weights = {key: self._weights_for(self._bounds.get(key), n[kept]) for key, n in norms.items()}
        sums: dict[str, Tensor] = {}
        for key, names in self._groups.members.items():
            sums.update(bounded_sums(self._take_factors(names, kept), weights[key], self._groups.call.space))
        return self._clipping(norms, weights, kept), sums

    def _clip_without_looking(self, norms: Mapping[Hashable, Tensor]) -> tuple[Clipping, dict[str, Tensor]]:
        """`clip` with one look in all: whether there is a sample that needs another, which then gets it."""
        space, members = self._groups.call.space, self._groups.members
        weights = {
            key: self._weights_for(self._bounds.get(key), n).to(self._groups.call.dtype, copy=True)
            for key, n in norms.items()
        }
        sane = [self._within_range(self._bounds.get(key), norms[key], weights[key]) for key in members]
        sane += [answer.to(self._groups.call.device) for answer in terms_are_bounded(self._factors, space)]
        if sane:
            ordinary = torch.cat(sane) if len(sane) > 1 else sane[0]
            if not has_numbers(ordinary):
                certify(ordinary, "a gradient is not finite, vanishes or cancels, or its weight is extreme")
            elif not bool(ordinary.all()):
                with looking(True):
                    return self._again().clip()
        self._dropped: list[int] = []
        if self.nonfinite == "raise":
            self._raise_on_all_ranks(self._dropped)
        sums: dict[str, Tensor] = {}
        for key, names in members.items():
            sums.update(bounded_sums(self._take_factors(names, slice(None)), weights[key], space))
        return self._clipping(norms, weights, slice(None), own=True), sums

    def _within_range(self, bound: float | None, norms: Tensor, weights: Tensor) -> Tensor:
        """(B,): is a norm finite, as numbers of the gradients' dtype are, and its weight fit for float32?"""
        most = torch.finfo(self._groups.call.dtype).max
        if bound is not None:  # the weights follow from the norms
            return norms <= min(most, bound / SMALLEST_WEIGHT)
        size = weights.abs()
        return (norms <= most) & (size < LARGEST_WEIGHT) & ((size >= SMALLEST_WEIGHT) | (size == 0))

    def _again(self) -> ClippedSum:
        """This reduction before anything was computed of its factors."""
        fresh = copy(self)
        fresh._norms, fresh._factors = ParameterNorms(self._groups.call), {}
        for name, factor in self._factors.items():
            fresh.add(name, factor[: factor.batch])
        return fresh

    def _factors_of(self, names: Sequence[str]) -> dict[str, Factor]:
        return {name: self._factors[name] for name in names if name in self._factors}

    def _select_finite(self, norms: Mapping[Hashable, Tensor]) -> Selection:
        """The samples whose gradients are finite; others raise an error, or are dropped."""
        finite = _finite(list(norms.values()))
        self._dropped = [] if finite is None else (~finite).nonzero().flatten().tolist()
        if self.nonfinite == "raise":
            self._raise_on_all_ranks(self._dropped)
        return slice(None) if finite is None else finite.nonzero().squeeze(1)

    def _take_factors(self, names: Sequence[str], kept: Selection) -> dict[str, Factor]:
        """The factors of the samples that are kept. Dropped ones are cut out: zero times NaN is not zero."""
        factors = self._factors_of(names)
        for name in factors:
            del self._factors[name]
        if isinstance(kept, Tensor):
            for name in factors:
                factors[name] = factors[name][kept.to(factors[name].device)]
        return factors

    def _clipping(
        self,
        norms: Mapping[Hashable, Tensor],
        weights: Mapping[Hashable, Tensor],
        kept: Selection,
        *,
        own: bool = False,
    ) -> Clipping:
        """The norms and weights of all samples, where those that are not kept have weight 0.

        They are copied, but for weights that are the reduction's ``own``.
        """
        groups, dtype = self._groups, self._groups.call.dtype
        if isinstance(kept, Tensor):
            weights = {key: torch.zeros_like(norms[key]).index_copy(0, kept, w) for key, w in weights.items()}
        packed_norms, packed_weights = (
            groups.pack({k: t.to(dtype, copy=copies) for k, t in w.items()})
            for w, copies in ((norms, True), (weights, not own))
        )
        sensitivity = self.sensitivity if self.weights is not None else math.hypot(*self._bounds.values())
        return Clipping(packed_norms, packed_weights, self._dropped, sensitivity)

    def _raise_on_all_ranks(self, dropped: list[int]) -> None:
        """Raise if any rank has dropped samples: one that went on would wait for the others' sums."""
        call = self._groups.call
        elsewhere = 0 if call.ranks is None else call.ranks.count([len(dropped)], call.device)[0] - len(dropped)
        if dropped or elsewhere:
            raise NonFiniteError(dropped, call.batch, elsewhere)

    def weigh(self, norms: Tensor) -> Tensor:
        """(B,): the weights for samples with these norms, which are finite, for a sum that is computed elsewhere.

        >>> import torch, persample as ps
        >>> ps.ClippedSum(1.0).weigh(torch.tensor([0.5, 4.0]))
        tensor([1.0000, 0.2500])
        """
        if self.per is not None:
            raise ValueError("one weight per sample needs one group of parameters: leave out per=")
        return self._weights_for(None if self.max_norm is None else values_of(self.max_norm)[0], norms)

    def _weights_for(self, bound: float | Tensor | None, norms: Tensor) -> Tensor:
        """(B,): the weights of one group of parameters."""
        if bound is None:
            return self._custom_weights(norms)
        if self.gamma is not None:
            return bound / (norms + self.gamma)
        if is_differentiable():  # the same, whose derivative is that of 1 for a gradient of zero
            return bound / norms.clamp(min=bound)
        return (bound / norms).clamp(max=1)  # a gradient of zero has inf, hence 1

    def _custom_weights(self, norms: Tensor) -> Tensor:
        """(B,): what the user's function returns, if it can be used."""
        assert self.weights is not None
        given = norms.clone() if can_look(norms.device) else norms.where(norms.isfinite(), 0)
        weights = self.weights(given)
        if not isinstance(weights, Tensor) or weights.shape != norms.shape:
            got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(f"weights must return one weight per sample, {tuple(norms.shape)}, but returned {got}")
        if can_look(norms.device) and not bool((weights.abs() < LARGEST_WEIGHT).all()):
            raise unusable(weights)
        return detached_by_default(weights).to(norms)

    def _bounds_by_group(self) -> dict[Hashable, float]:
        """The bound of every group."""
        keys, given = list(self._groups.members), self.max_norm
        if given is None:
            return {}
        if isinstance(given, Mapping):
            if set(given) != set(keys):
                raise ValueError(f"max_norm must have one bound per group: expected {keys}, got {list(given)}")
            return {key: given[key] for key in keys}  # type: ignore[index]
        bounds = list(given) if isinstance(given, Sequence) else [given] * len(keys)
        if len(bounds) != len(keys):
            raise ValueError(f"max_norm must have one bound per group: expected {len(keys)}, got {len(bounds)}")
        return dict(zip(keys, bounds, strict=True))


def _finite(norms: Sequence[Tensor]) -> Tensor | None:
    """(B,): which samples have finite norms in all groups; None if all samples have."""
    if not norms:
        return None
    finite = norms[0].isfinite() if len(norms) == 1 else torch.stack([n.isfinite() for n in norms]).all(0)
    return None if bool(finite.all()) else finite


def unusable(weights: Any) -> ValueError:
    """What to say of weights that a user's function has returned."""
    return ValueError(f"weights must be finite numbers below {LARGEST_WEIGHT}, but are {weights}")


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def values_of(bounds: Bounds | None) -> list[float]:
    """The numbers among bounds; none for None."""
    if bounds is None:
        return []
    if isinstance(bounds, Mapping):
        return list(bounds.values())
    return list(bounds) if isinstance(bounds, Sequence) else [bounds]
