"""Clipped sums of whole numbers, without rounding errors: their sensitivity is proven. Private training uses them.

Where numbers cannot be looked at, all questions are asked at once, after everything that they are about was computed as
if the answers were the usual ones (`Answers`). Whatever they are, samples are weighted and rounded in the same way: how
one is must not depend on others.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .._errors import InteractionError
from ..factors import Dense, DenseCopy, Factor, Masked, Part, regroup, split
from ..factors.base import Selection
from ..factors.integer_sums import IntegerSum
from ..factors.limits import WHOLE, Limits, Unit
from ..kernels.certificates import usual_size
from ..kernels.devices import can_look, full_precision
from ..kernels.norms import wide
from ..kernels.pages import recycled
from .base import Call
from .clipping import LARGEST_WEIGHT, ClippedSum, Clipping, unusable
from .groups import listed
from .norms import ParameterNorms

_SAME_WEIGHT = 1e-4  # within which weights are the same but for rounding, relatively
_MIN_KEPT = 2**26  # bytes of stacks that may be kept in any case: writing them twice takes longer than all else


class Answers(NamedTuple):
    """What has to be known of numbers that were computed, read at once."""

    weighed_down: float  # the share of samples with a weight below one
    finite: float = 1  # are all norms?
    usable: float = 1  # are all weights finite, and not too large?
    largest: float = 0  # the largest sum of terms that is to be added up at once, in units


@dataclass
class JointSums:
    """The sums of parameters that share one factor, which are computed when the first of them is taken."""

    names: Sequence[str]
    integer_sum: IntegerSum
    at_once: bool = False  # are the terms known to be small enough?
    weights: Tensor = field(default_factory=lambda: torch.empty(0))  # for the samples of every name
    _totals: dict[str, Tensor] = field(default_factory=dict)

    def weigh(self, weights: Tensor) -> None:
        """Set the weights of the samples."""
        self.weights = weights if len(self.names) == 1 else weights.repeat(len(self.names))

    def term_sizes(self) -> list[Tensor]:
        """How large the terms of all samples are at most, in units, for every sum that is to be computed at once."""
        return [sizes(self.weights, len(self.names)) for sizes in self.integer_sum.term_sizes]

    def term_sizes_of_samples(self) -> list[Tensor]:
        """The same for every sample on its own, one name after another."""
        return [sizes(self.weights, len(self.weights)) for sizes in self.integer_sum.term_sizes]

    def take(self, name: str) -> Tensor:
        """A parameter's sum; it can be taken once."""
        if not self._totals:
            with full_precision(self.weights.device):
                totals = self.integer_sum.totals(self.weights, len(self.names), at_once=self.at_once)
            self._totals = dict(zip(self.names, totals, strict=True))
            del self.integer_sum  # and with it the factors
        return self._totals.pop(name)


@dataclass(frozen=True)
class ExactSums:
    """Clipped sums by parameter name, in whole numbers of the parameter's unit, computed when they are taken."""

    clipping: Clipping
    asked: Clipping  # with the weights that the reduction asks for, before rounding errors are taken into account
    units: Mapping[str, Unit]
    _sums: dict[str, JointSums]
    weighed_down: float = 0.0  # the share of samples with a weight below one
    line: ClassVar[None] = None  # they are taken one by one

    @property
    def joint(self) -> list[JointSums]:
        """The sums that are computed together, once each."""
        return list({id(sums): sums for sums in self._sums.values()}.values())

    def take(self, name: str) -> Tensor | None:
        """A parameter's sum in its unit's dtype, where complex numbers are pairs; None if the losses do not reach it.

        It can be taken once.
        """
        sums = self._sums.pop(name, None)
        return None if sums is None else sums.take(name)


class ExactClippedSum(ClippedSum):
    """The clipped sum of another reduction without rounding errors: no sample adds more than the bound.

    Weights are those of the other reduction, or smaller where the rounding of a sample could exceed its bound.

    Args:
        clip: how to clip. A function for weights needs a stated sensitivity.
        samples: how many samples may be added up at most, in this call and in others.
        padding: how many samples at the end of the batch do not count.
    """

    passes = 1  # `Run` must not write factors out: how a sample is rounded must not depend on the batch
    takes_stacks = False
    over_ranks = False

    def __init__(self, clip: ClippedSum, samples: int, padding: int = 0) -> None:
        vars(self).update(vars(clip))
        self._samples, self._padding = samples, padding

    def start(self, call: Call) -> None:
        if call.losses is not None:
            raise ValueError(f"an exact sum bounds one loss per sample, (B,), but these are {call.losses}")
        call = replace(call, batch=self._counting(call.batch))
        super().start(call)
        self._norms = ParameterNorms(call, together=False)  # which must not depend on the rest of the batch either
        self._kept_bytes = 0  # of stacks
        self._parts: dict[str, Factor] = {}  # which are prepared when all parts of their whole are here
        self.units = {
            name: Unit.below(self._bound_of(key), self._samples)
            for key, names in self._groups.members.items()
            for name in names
        }

    def _counting(self, batch: int) -> int:
        """How many samples of a batch count."""
        return batch - self._padding

    def _of_counting(self, factor: Factor) -> Factor:
        """The gradients of the samples that count."""
        return factor[: factor.batch - self._padding] if self._padding else factor

    def units_for(self, params: Mapping[str, Tensor]) -> Mapping[str, Unit]:
        """The units of all parameters' sums, which do not depend on data."""
        self.start(Call(params, self._padding, torch.device("cpu"), dict))
        return self.units

    def _bound_of(self, key: Hashable) -> float:
        """What a sample may add to a group of parameters at most."""
        bound = self._bounds.get(key, self._stated_sensitivity)
        if bound is None:
            raise ValueError("weights without a stated sensitivity bound nothing: ClippedSum(..., sensitivity=...)")
        return bound

    def add(self, name: str, factor: Factor) -> None:
        factor = self._of_counting(factor)
        if isinstance(factor, Part):
            self._parts[name] = factor
        else:
            super().add(name, self._prepared(factor))

    def _prepare_parts(self) -> None:
        """Add the parts that have been collected, those of one whole at once."""
        for names, whole in regroup(self._parts):
            for name, part in zip(names, split(self._prepared(whole), len(names)), strict=True):
                super().add(name, part)
        self._parts = {}

    def _prepared(self, factor: Factor) -> Factor:
        """The factor with its norms; written out and kept, if its sums need stacks and memory allows."""
        with full_precision(factor.device):
            return self._with_norms(factor)

    def _with_norms(self, factor: Factor) -> Factor:
        space = self._groups.call.space
        if factor.integer_sum_needs_stack and not isinstance(factor, (Dense, Masked)):
            size = factor.batch * factor.numel * wide(factor.dtype).itemsize
            additional = 0 if size <= factor.nbytes else size
            kept, limit = (usual_size(n, factor.batch) for n in (self._kept_bytes + additional, space.limit))
            if kept <= max(limit, _MIN_KEPT):
                self._kept_bytes += additional
                out = recycled((factor.batch, *factor.shape), wide(factor.dtype), factor.device)
                factor = DenseCopy.of(factor, out, space)
        factor.cache_batch_independent_norms(space)
        return factor

    def result(self) -> ExactSums:
        self._prepare_parts()
        norms = self._norms.by_group(self._groups)
        if can_look(self._groups.call.device):
            sums = self._weighted(norms, self._select_finite(norms))
            return replace(sums, weighed_down=float(_weighed_down(sums.clipping)))
        factors, self._dropped = dict(self._factors), list[int]()
        sums = self._weighted(norms, slice(None))
        answers = self._ask(sums, norms)
        if not answers.finite:
            self._factors = factors
            sums = self._weighted(norms, self._select_finite(norms))
            answers = self._ask(sums)
        if not answers.usable:
            raise unusable(sums.asked.weights)
        for each in sums.joint:
            each.at_once = answers.largest < 2.0**WHOLE
        return replace(sums, weighed_down=answers.weighed_down)

    def _ask(self, sums: ExactSums, norms: Mapping[Hashable, Tensor] | None = None) -> Answers:
        """The only look at what was computed: at norms that may not be finite, at weights and terms."""
        asked = {"weighed_down": _weighed_down(sums.clipping)}
        if norms:
            asked["finite"] = torch.stack(list(norms.values())).isfinite().all()
        if self.weights is not None:
            asked["usable"] = (torch.stack(listed(sums.asked.weights)).abs() < LARGEST_WEIGHT).all()
        sizes = [t.to(self._groups.call.device) for each in sums.joint for t in each.term_sizes()]
        if sizes:
            asked["largest"] = torch.cat(sizes).amax()
        read = torch.stack([answer.double() for answer in asked.values()]).tolist()
        return Answers(**dict(zip(asked, read, strict=True)))

    def _weighted(self, norms: Mapping[Hashable, Tensor], kept: Selection) -> ExactSums:
        """The sums over the samples that are kept, to be computed when they are taken."""
        asked = {key: self._weights_for(self._bounds.get(key), n[kept]) for key, n in norms.items()}
        sums_by_group = self._sums_by_group(kept)
        weights = self._reduce_weights(asked, self._limits_of(sums_by_group))
        self._weigh(sums_by_group, weights)
        sums_by_name = {name: sums for every in sums_by_group.values() for sums in every for name in sums.names}
        clipping, asked_clipping = (self._clipping(norms, given, kept) for given in (weights, asked))
        return ExactSums(clipping, asked_clipping, self.units, sums_by_name)

    def _custom_weights(self, norms: Tensor) -> Tensor:
        """(B,): what the user's function returns for every norm on its own: others must not move a sample's weight."""
        ask = super()._custom_weights
        if not can_look(norms.device):
            return torch.vmap(ask)(norms.unsqueeze(1)).squeeze(1)
        weights = torch.cat([ask(one) for one in norms.split(1)])
        if not torch.allclose(ask(norms), weights, rtol=_SAME_WEIGHT, atol=0):
            raise InteractionError(
                "samples interact in the function that was given for weights: with the norms of some samples alone it "
                "returns others than with those of all. What one sample adds would follow from others, which no "
                "sensitivity bounds: compute a sample's weight from its own norm and constants. For a bound that "
                "follows a quantile use dp.AdaptiveClip"
            )
        return weights

    def _sums_by_group(self, kept: Selection) -> dict[Hashable, list[JointSums]]:
        """The sums of every group, still without weights."""
        return {
            key: [self._joint_sums(few, whole) for few, whole in regroup(self._take_with_norms(names, kept))]
            for key, names in self._groups.members.items()
        }

    def _limits_of(self, sums: Mapping[Hashable, Sequence[JointSums]]) -> dict[Hashable, Limits]:
        """What each sample can add to the sums of every group that has any."""
        return {key: _limits(every) for key, every in sums.items() if every}

    def _weigh(self, sums: Mapping[Hashable, Sequence[JointSums]], weights: Mapping[Hashable, Tensor]) -> None:
        for key, every in sums.items():
            for each in every:
                each.weigh(weights[key])

    def _take_with_norms(self, names: Sequence[str], kept: Selection) -> dict[str, Factor]:
        """The factors of the samples that are kept, with their norms."""
        norms = {name: self._factors[name].cached_norms() for name in names if name in self._factors}
        factors = self._take_factors(names, kept)
        if isinstance(kept, Tensor):
            for name, factor in factors.items():
                factor.set_norms(norms[name][kept.to(factor.device)])
        return factors

    def _reduce_weights(
        self, asked: Mapping[Hashable, Tensor], limits: Mapping[Hashable, Limits]
    ) -> dict[Hashable, Tensor]:
        """The weights by group, reduced where a sample could otherwise add more than its bound.

        A sensitivity that is stated for a function of weights bounds all groups as one vector.
        """
        weights = dict(asked)
        if self._stated_sensitivity is not None and limits:
            all_groups = Limits.concatenated([(x.weighted(asked[key].abs()), 1) for key, x in limits.items()])
            reduction = all_groups.largest_weights(self._stated_sensitivity).clamp(max=1)
            return {key: w * reduction for key, w in weights.items()}
        for key, x in limits.items():
            cap = x.largest_weights(self._room(key))
            weights[key] = torch.where(asked[key].abs() <= cap, asked[key], cap)
        return weights

    def _room(self, key: Hashable) -> float | Tensor:
        """The bound of a group."""
        return self._bounds[key]

    def _joint_sums(self, names: Sequence[str], factor: Factor) -> JointSums:
        return JointSums(names, factor.integer_sum(self.units[names[0]], self._groups.call.space))


def _weighed_down(clipping: Clipping) -> Tensor:
    """The share of samples that have a weight below one in any group."""
    weights = torch.stack([w.double() for w in listed(clipping.weights)])
    return (weights < 1).any(0).double().sum() / max(weights.shape[1], 1)


def _limits(every: Sequence[JointSums]) -> Limits:
    """What each sample can add to the sums of all parameters, seen as one vector."""
    return Limits.concatenated([(sums.integer_sum.limits, len(sums.names)) for sums in every])
