"""Who takes part in a step. One process alone here; several put their own `Team` in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..reduce import reduce
from ..reductions import ClippedSum

AddNoise = Callable[[Sequence[Tensor]], None]


class Team:
    """One process. A subclass overrides what several processes do differently; everything else is the same for both.

    Every process of a team draws the same samples and keeps the same accounts; `share` says which of the samples are
    its own, `release` makes one noisy sum of the local ones.
    """

    rank = 0
    size = 1
    reruns = True  # whether the model may be run again by this process alone

    def agree(self, value: bytes) -> bytes:
        """The first process's value, in all of them: keys and nonces of random numbers."""
        return value

    def share(self, samples: list[int]) -> list[int]:
        """Those of a batch's samples that this process takes."""
        return samples[self.rank :: self.size]

    def clipped(self, losses: Tensor, params: Mapping[str, Tensor], clip: ClippedSum) -> Any:
        """The clipped sum over this process's losses, by name, with its ``clipping``."""
        return reduce(losses, params, clip, independent=True)[0]

    def release(self, sums: Sequence[Tensor], add_noise: AddNoise) -> None:
        """From local sums to their noisy total, in place and the same in all processes; noise is drawn once."""
        add_noise(sums)
