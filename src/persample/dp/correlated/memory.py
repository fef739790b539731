"""What later noise has to know of earlier noise, for a part of the numbers at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor, from_numpy

from ..normals import Numbers


class Memory(ABC):
    """The noise of earlier steps, in whole steps of the grid, as far as it takes part in later ones.

    Noise ``N`` of a step is its independent noise less `due`, rounded; then it is kept. `due` depends on ``N`` alone.
    """

    def __init__(self, rows: int, size: int) -> None:
        self.kept: Numbers = np.zeros((rows, size))
        self.steps = 0  # that are remembered

    @abstractmethod
    def due(self, start: int, stop: int) -> Numbers:
        """``(C - I) N`` of the step under way, for some of the numbers."""

    @abstractmethod
    def keep(self, start: int, noise: Numbers) -> None:
        """Remember the noise of the step under way, for the numbers that begin there."""

    def advance(self) -> None:
        """One more step is remembered, for all numbers."""
        self.steps += 1

    def saved(self) -> Tensor:
        """All that is kept, as a tensor."""
        return from_numpy(self.kept)

    def restore(self, kept: Tensor, steps: int) -> None:
        """Go on from what was saved; refuses what cannot have been."""
        if kept.shape != self.kept.shape or not bool(kept.isfinite().all()):
            raise ValueError(f"numbers of shape {tuple(kept.shape)} instead of {self.kept.shape}, or not finite")
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"a number of steps cannot be {steps!r}")
        self.kept[:] = kept.numpy()
        self.steps = steps


class BandedMemory(Memory):
    """The noise of the last few steps, each in a row of its own; the oldest is overwritten."""

    def __init__(self, coefficients: Sequence[float], size: int) -> None:
        super().__init__(len(coefficients) - 1, size)
        self._coefficients = coefficients

    def due(self, start: int, stop: int) -> Numbers:
        found: Numbers = np.zeros(stop - start)
        for ago in range(1, min(len(self.kept), self.steps) + 1):
            found += self._coefficients[ago] * self.kept[(self.steps - ago) % len(self.kept), start:stop]
        return found

    def keep(self, start: int, noise: Numbers) -> None:
        if len(self.kept):
            self.kept[self.steps % len(self.kept), start : start + len(noise)] = noise


class BufferedMemory(Memory):
    """Sums over all earlier noise, each of which forgets at its own pace."""

    def __init__(self, scales: Sequence[float], decays: Sequence[float], size: int) -> None:
        super().__init__(len(scales), size)
        self._scales, self._decays = scales, decays

    def due(self, start: int, stop: int) -> Numbers:
        found: Numbers = np.zeros(stop - start)
        for scale, buffer in zip(self._scales, self.kept, strict=True):
            found += scale * buffer[start:stop]
        return found

    def keep(self, start: int, noise: Numbers) -> None:
        for decay, buffer in zip(self._decays, self.kept, strict=True):
            part = buffer[start : start + len(noise)]
            part *= decay
            part += noise
