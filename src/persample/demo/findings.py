"""The results of a run, from which the report is made."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .causes import Causes
from .data import Digits
from .private import PrivateRun
from .scores import Evidence, Score, precision
from .settings import Settings
from .verify import Verdict


@dataclass(frozen=True)
class Trained:
    """Ordinary training: accuracy on the test images, and what was seen after every epoch."""

    accuracy: float
    predicted: Tensor  # (N,), of the training images, by the trained model
    history: list[Evidence]
    exact: list[float]  # noise scale from all training gradients
    estimated: list[float]  # noise scale from the batches of the epoch


@dataclass(frozen=True)
class Findings:
    """Everything, and how long each part took."""

    settings: Settings
    seed: int
    digits: Digits
    trained: Trained
    causes: Causes
    scores: dict[str, Score]
    private: list[PrivateRun]
    verdict: Verdict
    seconds: dict[str, float]

    @property
    def flips(self) -> int:
        """How many labels were flipped."""
        return int(self.digits.flipped.sum())

    @property
    def chance(self) -> float:
        """What a list in random order finds, at any length."""
        return self.flips / len(self.digits.x)

    @property
    def depths(self) -> list[int]:
        """How far down the list precision is reported: a page, half of the flips, all of them, twice as many."""
        return [self.settings.shown, self.flips // 2, self.flips, 2 * self.flips]

    @property
    def private_accuracy(self) -> dict[float, tuple[float, float, float]]:
        """By epsilon: mean, lowest and highest."""
        groups = {e: [r.accuracy for r in self.private if r.epsilon == e] for e in self.settings.epsilons}
        return {e: (sum(group) / len(group), min(group), max(group)) for e, group in groups.items()}

    def precisions(self, name: str) -> list[float]:
        """A score's precision at all `depths`."""
        return [precision(self.scores[name].order, self.digits.flipped, k) for k in self.depths]
