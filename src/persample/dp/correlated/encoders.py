"""Encoders of correlated noise: what they cost in sensitivity, how much error they leave, what has to be remembered."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import optimise
from .memory import BandedMemory, BufferedMemory, Memory
from .optimise import Coefficients, buffered_column
from .toeplitz import inverse, mean_squared_error, prefix_sums, product, squared_sensitivity

_UNIT = 2.0**-53  # of rounding in float64
_FURTHEST = 14.0  # standard deviations, which normal numbers do not reach
_MOST_SLACK = 0.01


@dataclass(frozen=True)
class Encoder(ABC):
    """A lower-triangular Toeplitz matrix for a number of steps, with ones on its diagonal."""

    steps: int
    momentum: float

    @property
    @abstractmethod
    def column(self) -> Tensor:
        """(steps,): its first column."""

    @property
    @abstractmethod
    def reach(self) -> int:
        """How many steps a single participation moves."""

    @property
    @abstractmethod
    def rounding(self) -> float:
        """How far what is taken from the noise is from ``(C - I) N`` at most, for noise of which no input exceeds 1."""

    @abstractmethod
    def memory(self, size: int) -> Memory:
        """What a process keeps of so many numbers."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What has to be the same if a run is to go on with its memory."""

    @cached_property
    def norm(self) -> float:
        """The norm of the first column, which is the largest: how far one participation moves ``C x``."""
        return float(self.column.norm())

    @cached_property
    def error(self) -> float:
        """The root of the mean squared error of the workload's answers, for a noise multiplier of 1."""
        return self.norm * math.sqrt(float(mean_squared_error(self.column, prefix_sums(self.steps, self.momentum))))

    def participations(self, steps: int, separation: int) -> float:
        """How often an example takes part in so many steps: as many times as orthogonal columns would say.

        It is the squared sensitivity over that of one participation.
        """
        return float(squared_sensitivity(self.column[:steps], separation)) / self.norm**2

    def factor(self, noise_multiplier: float, size: int) -> float:
        """How much noise ``Z`` has, over the noise multiplier and the sensitivity of one step's sum.

        That is the norm of a column, and what rounding in float64 could add to it (docs/correlated-noise.md).
        """
        furthest = (1 + _MOST_SLACK) * _FURTHEST * noise_multiplier * self.norm + 1
        slack = 2 * self.rounding * furthest * math.sqrt(size * self.reach)
        if slack > _MOST_SLACK * self.norm:
            raise ValueError(
                f"rounding errors of correlated noise would add {slack / self.norm:.1%} to the sensitivity, for "
                f"{size} numbers, {self.steps} steps and noise_multiplier {noise_multiplier:g}: use less noise, fewer "
                f"steps, or mechanism='gaussian'"
            )
        return self.norm + slack

    @cached_property
    def _most(self) -> float:
        """How large noise can be, over its input: the sum of the absolute values of a row of ``C⁻¹``."""
        return 1.01 * float(inverse(self.column).abs().sum())


@dataclass(frozen=True)
class Banded(Encoder):
    """Coefficients of a few diagonals; all others are zero."""

    coefficients: Coefficients

    @cached_property
    def column(self) -> Tensor:
        given = torch.tensor(self.coefficients, dtype=torch.float64, device="cpu")
        return pad(given, (0, self.steps - len(given)))

    @property
    def reach(self) -> int:
        return len(self.coefficients)

    @property
    def rounding(self) -> float:
        bands = len(self.coefficients)
        return (bands + 1) * _UNIT * sum(map(abs, self.coefficients[1:])) * self._most if bands > 1 else 0.0

    def memory(self, size: int) -> Memory:
        return BandedMemory(self.coefficients, size)

    def describe(self) -> dict[str, Any]:
        return {"coefficients": list(self.coefficients)}


@dataclass(frozen=True)
class Buffered(Encoder):
    """Sums of a few geometric series: a buffered linear Toeplitz matrix (BLT)."""

    scales: Coefficients
    decays: Coefficients

    @cached_property
    def column(self) -> Tensor:
        scales, decays = (torch.tensor(t, dtype=torch.float64, device="cpu") for t in (self.scales, self.decays))
        return buffered_column(scales, decays, self.steps)

    @property
    def reach(self) -> int:
        return self.steps

    @cached_property
    def rounding(self) -> float:
        """A buffer is rounded twice in every step, and forgets as it decays; then buffers are added up."""
        found, noise = 0.0, inverse(self.column)
        for scale, decay in zip(self.scales, self.decays, strict=True):
            powers = decay ** torch.arange(self.steps, dtype=torch.float64, device="cpu")
            most = 1.01 * float(product(powers, noise).abs().sum())
            lasting = min(float(self.steps), 1 / (1 - decay))
            found += scale * most * (2 * lasting + len(self.scales) + 1) * _UNIT
        return found

    def memory(self, size: int) -> Memory:
        return BufferedMemory(self.scales, self.decays, size)

    def describe(self) -> dict[str, Any]:
        return {"scales": list(self.scales), "decays": list(self.decays)}


@lru_cache(maxsize=256)
def banded(bands: int, steps: int, momentum: float) -> Banded:
    """The banded encoder with the least expected error."""
    fewer = banded(bands // 2, steps, momentum).coefficients if bands > 3 else ()
    return Banded(steps, momentum, optimise.banded(bands, prefix_sums(steps, momentum), fewer))


@lru_cache(maxsize=64)
def buffered(buffers: int, steps: int, momentum: float, separation: int) -> Buffered:
    """The BLT encoder with the least expected error, for examples that take part in every ``separation``-th step."""
    return Buffered(steps, momentum, *optimise.buffered(buffers, prefix_sums(steps, momentum), separation))
