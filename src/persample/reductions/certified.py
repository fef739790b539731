"""Clipped sums of whole numbers for graphs, which say of every sample whether it could be added.

A graph cannot go on in another way for a sample that is not finite or cancels. So it leaves such samples out, and says
which: whoever runs the graph adds them by the eager engine. How a sample is weighted and rounded, and by whom, depends
on that sample alone, and not on those beside it: otherwise one sample could move what others add.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .._errors import NonFiniteError
from ..factors import Factor
from ..factors.limits import WHOLE
from ..kernels.certificates import certify, traced
from .base import Call
from .clipping import LARGEST_WEIGHT, ClippedSum, Clipping
from .exact import ExactClippedSum, JointSums

NOMINAL = 1.0  # the bound for which a graph is made where bounds move


@dataclass(frozen=True)
class CertifiedSums:
    """Clipped sums of those samples that could be added, in whole numbers of the parameters' units."""

    names: tuple[str, ...]  # of the parameters that have sums
    line: Tensor  # the sums, end to end
    clipping: Clipping  # of all samples
    asked: Clipping  # with the weights that the reduction asks for
    added: Tensor  # (B,): is the sample among those of the sums?


def put_end_to_end(sums: Sequence[Tensor], device: torch.device) -> Tensor:
    """All sums in one tensor of one dim, on that device."""
    flat = [t.reshape(-1).to(device) for t in sums]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64, device=device)


class CertifiedClippedSum(ExactClippedSum):
    """`ExactClippedSum` for a graph, of those samples for which its shorter ways are right.

    Args:
        clip: how to clip; the bound of one that is ``moving`` is `NOMINAL`.
        samples: how many samples may be added up at most, in this call and in others.
        moving: whether there is one bound for everything, which changes from call to call.
    """

    def __init__(self, clip: ClippedSum, samples: int, *, moving: bool = False) -> None:
        super().__init__(clip, samples)
        self._moving = moving
        self.set_for(NOMINAL, counting=0, at_once=samples)

    def set_for(self, bound: float, *, counting: int, at_once: int) -> None:
        """What changes from call to call: a bound that moves, and how many samples count of how many there may be.

        Whole numbers are of a unit that moves with the bound: gradients are taken times a power of two, so that the
        bound comes to lie between 1 and 2.
        """
        power = math.ldexp(1.0, math.frexp(NOMINAL)[1] - math.frexp(bound)[1])
        self._now = torch.tensor([bound, power, counting, 2.0**WHOLE / at_once], dtype=torch.float64)

    def start(self, call: Call) -> None:
        super().start(call)
        self._doubts: list[Tensor] = []  # (B,) each: is all right with the sample?
        self._now = self._now.to(call.device)

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        """Inside, what is certified is so for every sample, and for every one on its own."""
        with traced() as certificates:
            yield
        batch = self._groups.call.batch
        for certificate in certificates:
            self._doubts.append(certificate.holds.reshape(-1, batch).all(0).to(self._groups.call.device))

    def add(self, name: str, factor: Factor) -> None:
        with self._collecting():
            super().add(name, factor)

    def result(self) -> CertifiedSums:  # type: ignore[override]
        with self._collecting():
            self._prepare_parts()
            norms = self._norms.by_group(self._groups)
            self._dropped = []
            asked = {key: self._weights_for(self._bound(key), n) for key, n in norms.items()}
            sums = self._sums_by_group(slice(None))
            scaled = {key: w * self._now[1] for key, w in asked.items()} if self._moving else asked
            weights = self._reduce_weights(scaled, self._limits_of(sums))
        certain = self._certain(norms, asked, weights, sums)
        counting = torch.arange(len(certain), device=certain.device) < self._now[2]
        added = certain & counting
        self._weigh(sums, {key: torch.where(added, w, 0) for key, w in weights.items()})
        joint = {name: each for every in sums.values() for each in every for name in each.names}
        names = tuple([name for name in self._groups.call.params if name in joint])
        line = put_end_to_end([joint[name].take(name) for name in names], certain.device)
        certify(certain | ~counting, "a gradient is not finite or cancels, or its weight is extreme")
        if self._moving:
            weights = {key: w / self._now[1] for key, w in weights.items()}
        # The sensitivity of a bound that moves is not the graph's to state.
        clipping, asked_clipping = (Clipping(*self._clipping(norms, w, slice(None))) for w in (weights, asked))
        return CertifiedSums(names, line, clipping, asked_clipping, added)

    def _bound(self, key: Hashable) -> float | Tensor | None:
        return self._now[0] if self._moving else self._bounds.get(key)

    def _room(self, key: Hashable) -> float | Tensor:
        return self._now[0] * self._now[1] if self._moving else super()._room(key)

    def _certain(
        self,
        norms: Mapping[Hashable, Tensor],
        asked: Mapping[Hashable, Tensor],
        weights: Mapping[Hashable, Tensor],
        sums: Mapping[Hashable, Sequence[JointSums]],
    ) -> Tensor:
        """(B,): is everything finite, and the sample's share of the sums' terms so small that all can be added up?"""
        self._weigh(sums, weights)
        certain = [*self._doubts]
        certain += [n.isfinite() for n in norms.values()]
        certain += [w.abs() < LARGEST_WEIGHT for w in asked.values()]
        batch = self._groups.call.batch
        for every in sums.values():
            for each in every:
                each.at_once, sizes = True, each.term_sizes_of_samples()
                certain += [(t < self._now[3]).reshape(-1, batch).all(0) for t in sizes]
        return torch.stack(certain).all(0)


class ExactClippedSumOfSome(ExactClippedSum):
    """The clipped sum of a few samples of a batch, by their indices; others add nothing, and are not looked at."""

    def __init__(self, clip: ClippedSum, samples: int, which: Tensor) -> None:
        super().__init__(clip, samples)
        self._which = which

    def _counting(self, batch: int) -> int:
        return len(self._which)

    def _of_counting(self, factor: Factor) -> Factor:
        return factor[self._which.to(factor.device)]

    def _raise_on_all_ranks(self, dropped: list[int]) -> None:
        if dropped:
            raise NonFiniteError(self._which[dropped].tolist(), self._batch)

    def start(self, call: Call) -> None:
        self._batch = call.batch
        super().start(call)
