"""Clipped sums whose sensitivity is a theorem: of whole numbers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..factors import Factor, Part
from ..factors.exact import Exact, Limits, Unit
from .base import Call
from .clipping import ClippedSum, Clipping


@dataclass
class ExactSums:
    """Clipped sums by parameter name, as whole numbers of a unit each, computed when they are asked for."""

    clipping: Clipping
    asked: Clipping  # the same with the weights of the reduction itself
    units: Mapping[str, Unit]
    _shares: dict[str, tuple[Exact, Tensor]]

    def take(self, name: str) -> Tensor | None:
        """A parameter's sum in int64, once; None where the losses do not reach it. Complex numbers are pairs."""
        if name not in self._shares:
            return None
        exact, weights = self._shares.pop(name)
        return exact.total(weights)


class ExactClippedSum(ClippedSum):
    """The clipped sum of another reduction, but exact: no sample adds more than the bound, whatever is rounded.

    Weights are those of the other, or less where rounding errors could otherwise carry a sample beyond its bound.

    Args:
        clip: how to clip. Weights of its own need a sensitivity.
        samples: whose shares may come together at most, in this call and in others.
        padding: how many of the last samples do not count.
    """

    over_ranks = False

    def __init__(self, clip: ClippedSum, samples: int, padding: int = 0) -> None:
        vars(self).update(vars(clip))
        self._samples, self._padding = samples, padding

    def start(self, call: Call) -> None:
        super().start(replace(call, batch=call.batch - self._padding))
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
        super().add(name, self._counted(factor))

    def add_parts(self, names: Sequence[str], whole: Factor) -> None:
        if not self._padding:
            return super().add_parts(names, whole)
        for name, part in zip(names, Part.all_of(whole, len(names)), strict=True):
            self.add(name, part)

    def _counted(self, factor: Factor) -> Factor:
        return factor[: factor.batch - self._padding] if self._padding else factor

    def result(self) -> ExactSums:
        norms = self._norms.by_group(self._groups)
        kept = self._kept(norms)
        asked: dict[Hashable, Tensor] = {}
        weights: dict[Hashable, Tensor] = {}
        shares: dict[str, tuple[Exact, Tensor]] = {}
        space = self._groups.call.space
        for key, names in self._groups.members.items():
            exact = {name: f.exact(self.units[name], space) for name, f in self._take(names, kept).items()}
            asked[key] = self._weigh(self._bounds.get(key), norms[key][kept])
            weights[key] = self._within(asked[key], exact, self._most(key))
            shares.update({name: (share, weights[key]) for name, share in exact.items()})
        done, wanted = (self._clipping(norms, given, kept) for given in (weights, asked))
        return ExactSums(done, wanted, self.units, shares)

    def _within(self, weights: Tensor, exact: Mapping[str, Exact], most: float) -> Tensor:
        """The weights, or as much less as it takes for no sample to add more than ``most``."""
        if not exact:
            return weights
        cap = Limits.together([share.limits for share in exact.values()]).weights(most)
        return torch.where(weights.abs() <= cap, weights, cap.copysign(weights))
