"""What private training tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """What became of a batch. But for ``number`` and ``updated`` it tells of the data without noise: keep it secret.

    ``updated`` is False for all but the last part of a batch that is split by ``physical_batch_size``. ``size`` and
    ``clipped`` (the share of samples that were weighed down) are of this part, ``dropped`` counts its samples left out
    as not finite. ``size`` is 0 where a sample was run in place of none, which did not count. Where the plan is for
    users, samples are users.
    """

    number: int
    updated: bool
    size: int
    clipped: float
    dropped: int


@dataclass(frozen=True)
class Spent:
    """Epsilon at delta, so far."""

    epsilon: float
    delta: float
    steps: int

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:.4g} at delta {self.delta:g} after {self.steps} steps"
