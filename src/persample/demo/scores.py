"""What the gradients say about each training example, and how well it finds the flipped labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps

from .data import CLASSES, Digits
from .noise_scale import Moments, moments


class Evidence(NamedTuple):
    """About every training example at one point of training: loss, norm, mean cosine with its class; all (N,)."""

    losses: Tensor
    norms: Tensor
    cosines: Tensor


def look(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Evidence, dict[str, Tensor]]:
    """Evidence about examples with one and the same label, and their mean gradient."""
    losses = F.cross_entropy(model(x), y, reduction="none")
    mean = ps.WeightedSum(torch.full((len(x),), 1 / len(x)))
    unit = ps.ClippedSum(weights=reciprocal, sensitivity=1.0)  # the sum of all gradients, each of length 1
    norms, gradient, directions = ps.reduce(losses, model, ps.Norms(), mean, unit, retain_graph=True)
    dots = ps.dot(losses, model, directions)
    return Evidence(losses.detach(), norms, mean_cosine(norms, dots)), gradient


def reciprocal(norms: Tensor) -> Tensor:
    """1 / norm, and finite for a gradient of zeros."""
    return 1 / norms.clamp(min=torch.finfo(norms.dtype).tiny)


def mean_cosine(norms: Tensor, dots: Tensor) -> Tensor:
    """Every gradient's mean cosine with all the others: its product with the sum of unit vectors, less its own part."""
    weights = reciprocal(norms)
    return (weights * dots - (weights * norms).square()) / max(1, len(norms) - 1)


def look_at_all(model: nn.Module, digits: Digits) -> tuple[Evidence, Moments]:
    """Evidence about all training examples, class by class, and the moments of their gradients."""
    evidence_of_all = Evidence(*(torch.zeros(len(digits.x)) for _ in Evidence._fields))
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for label in range(CLASSES):
        members = (digits.y == label).nonzero().squeeze(1)
        evidence, gradient = look(model, digits.x[members], digits.y[members])
        for everybody, some in zip(evidence_of_all, evidence, strict=True):
            everybody[members] = some
        for name, part in gradient.items():
            total[name] += part * (len(members) / len(digits.x))
    return evidence_of_all, moments(evidence_of_all.norms, total, len(digits.x))


@dataclass(frozen=True)
class Score:
    """(N,) numbers, larger for what is more suspicious; ``gradients`` is False for the score to compare with."""

    title: str
    what: str
    values: Tensor
    gradients: bool = True

    @property
    def order(self) -> Tensor:
        """Indices, the most suspicious first."""
        return self.values.argsort(descending=True, stable=True)


def scores(history: list[Evidence], rates: list[float]) -> dict[str, Score]:
    """All scores, from what was seen after every epoch and the learning rates of these epochs."""
    losses, norms, cosines = (torch.stack(seen) for seen in zip(*history, strict=True))
    lr = torch.tensor(rates).unsqueeze(1)
    return {
        "norms": Score("gradient norm", "the mean of ‖g‖ over epochs", norms.mean(0)),
        "influence": Score(
            "self-influence",
            "the sum of lr · ‖g‖² over epochs, what steps on it take off its own loss (TracIn)",
            (lr * norms.square()).sum(0),
        ),
        "agreement": Score(
            "disagreement", "minus the mean cosine with the other gradients of its label", -cosines.mean(0)
        ),
        "loss": Score(
            "loss (no gradients)",
            "the mean over epochs, for which no gradients are needed",
            losses.mean(0),
            gradients=False,
        ),
    }


def precision(order: Tensor, flipped: Tensor, k: int) -> float:
    """The share of flipped labels among the first k."""
    return flipped[order[:k]].float().mean().item()
