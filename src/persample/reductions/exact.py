"""Clipped sums whose sensitivity is a theorem: of whole numbers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..factors import Dense, DenseCopy, Factor, Masked, Part, regroup, split
from ..factors.base import Selection
from ..factors.integer_sums import IntegerSum
from ..factors.limits import Limits, Unit
from ..kernels.norms import wide
from ..kernels.pages import recycled
from .base import Call
from .clipping import ClippedSum, Clipping

_KEPT = 2**26  # bytes of gradients that may be kept in any case: making them twice takes longer than all else


@dataclass
class Shares:
    """What samples add to parameters whose gradients are asked together, one after another's."""

    names: Sequence[str]
    exact: IntegerSum
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    _totals: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str) -> Tensor:
        """A parameter's sum, once."""
        if not self._totals:
            count = len(self.names)
            totals = self.exact.totals(self.weights.repeat(count), count)
            self._totals = dict(zip(self.names, totals, strict=True))
            del self.exact  # and with it the factors
        return self._totals.pop(name)


@dataclass(frozen=True)
class ExactSums:
    """Clipped sums by parameter name, as whole numbers of a unit each, computed when they are asked for."""

    clipping: Clipping
    asked: Clipping  # the same with the weights of the reduction itself
    units: Mapping[str, Unit]
    _shares: dict[str, Shares]

    def take(self, name: str) -> Tensor | None:
        """A parameter's sum in its unit's dtype, once; None where the losses do not reach it. Complex: pairs."""
        shares = self._shares.pop(name, None)
        return None if shares is None else shares.take(name)


class ExactClippedSum(ClippedSum):
    """The clipped sum of another reduction, but exact: no sample adds more than the bound, whatever is rounded.

    Weights are those of the other, or less where rounding errors could otherwise carry a sample beyond its bound.

    Args:
        clip: how to clip. Weights of its own need a sensitivity.
        samples: whose shares may come together at most, in this call and in others.
        padding: how many of the last samples do not count.
    """

    passes = 1  # nobody else writes factors out: how a share is rounded must not depend on the batch
    over_ranks = False

    def __init__(self, clip: ClippedSum, samples: int, padding: int = 0) -> None:
        vars(self).update(vars(clip))
        self._samples, self._padding = samples, padding

    def start(self, call: Call) -> None:
        super().start(replace(call, batch=call.batch - self._padding))
        self._written = 0  # bytes that are kept
        self._parts: dict[str, Factor] = {}  # of wholes, which come one after another
        self.units = {
            name: Unit.below(self._most(key), self._samples)
            for key, names in self._groups.members.items()
            for name in names
        }

    def units_for(self, params: Mapping[str, Tensor]) -> Mapping[str, Unit]:
        """The units of all parameters' sums, which do not depend on data."""
        self.start(Call(params, self._padding, torch.device("cpu"), dict))
        return self.units

    def _most(self, key: Hashable) -> float:
        """What a sample may add to a group of parameters."""
        found = self._bounds.get(key, self._stated)
        if found is None:
            raise ValueError("weights without a stated sensitivity bound nothing: ClippedSum(..., sensitivity=...)")
        return found

    def add(self, name: str, factor: Factor) -> None:
        factor = factor[: factor.batch - self._padding] if self._padding else factor
        if isinstance(factor, Part):
            self._parts[name] = factor
        else:
            super().add(name, self._prepared(factor))

    def _prepare_parts(self) -> None:
        """Parts are prepared as one whole."""
        for names, whole in regroup(self._parts):
            for name, part in zip(names, split(self._prepared(whole), len(names)), strict=True):
                super().add(name, part)
        self._parts = {}

    def _prepared(self, factor: Factor) -> Factor:
        """What will be written out to be rounded is written out once, and kept, as far as memory allows."""
        space = self._groups.call.space
        if factor.integer_sum_needs_stack and not isinstance(factor, (Dense, Masked)):
            size = factor.batch * factor.numel * wide(factor.dtype).itemsize
            kept = 0 if size <= factor.nbytes else size
            if self._written + kept <= max(space.limit, _KEPT):
                self._written += kept
                out = recycled((factor.batch, *factor.shape), wide(factor.dtype), factor.device)
                factor = DenseCopy.of(factor, out, space)
        factor.cache_batch_independent_norms(space)
        return factor

    def result(self) -> ExactSums:
        self._prepare_parts()
        norms = self._norms.by_group(self._groups)
        kept = self._kept(norms)
        asked = {key: self._weigh(self._bounds.get(key), n[kept]) for key, n in norms.items()}
        found = {
            key: [self._shares(few, whole) for few, whole in regroup(self._with_norms(names, kept))]
            for key, names in self._groups.members.items()
        }
        weights = self._within(asked, {key: _limits(each) for key, each in found.items() if each})
        shares: dict[str, Shares] = {}
        for key, every in found.items():
            for each in every:
                each.weights = weights[key]
                shares.update(dict.fromkeys(each.names, each))
        done, wanted = (self._clipping(norms, given, kept) for given in (weights, asked))
        return ExactSums(done, wanted, self.units, shares)

    def _with_norms(self, names: Sequence[str], kept: Selection) -> dict[str, Factor]:
        """The factors of the samples that are kept, with the norms that are known of them."""
        known = {name: self._factors[name].cached_norms() for name in names if name in self._factors}
        factors = self._take(names, kept)
        if isinstance(kept, Tensor):
            for name, factor in factors.items():
                factor.set_norms(known[name][kept.to(factor.device)])
        return factors

    def _within(self, asked: Mapping[Hashable, Tensor], limits: Mapping[Hashable, Limits]) -> dict[Hashable, Tensor]:
        """The weights, or as much less as it takes for no sample to add more than its bound, in every group.

        What was stated for weights of their own is for all groups together.
        """
        weights = dict(asked)
        if self._stated is not None and limits:
            share = Limits.concatenated([(x.weighted(asked[key].abs()), 1) for key, x in limits.items()])
            less = share.largest_weights(self._stated).clamp(max=1)
            return {key: w * less for key, w in weights.items()}
        for key, x in limits.items():
            cap = x.largest_weights(self._bounds[key])
            weights[key] = torch.where(asked[key].abs() <= cap, asked[key], cap)
        return weights

    def _shares(self, names: Sequence[str], factor: Factor) -> Shares:
        return Shares(names, factor.integer_sum(self.units[names[0]], self._groups.call.space))


def _limits(shares: Sequence[Shares]) -> Limits:
    return Limits.concatenated([(each.exact.limits, len(each.names)) for each in shares])
