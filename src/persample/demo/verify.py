"""The demo's own results against the slow definition: one ordinary backward per sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample import testing

ALLOWED = 500 * torch.finfo(torch.float32).eps  # sums are added in another order; as in `testing.check`


@dataclass(frozen=True)
class Verdict:
    """`testing.check` parameter by parameter, and the error of every reduction the demo has used."""

    gradients: testing.Report
    reductions: dict[str, float]  # largest difference over largest value

    @property
    def ok(self) -> bool:
        """Does everything agree?"""
        return self.gradients.ok and all(error <= ALLOWED for error in self.reductions.values())


def verify(model: nn.Module, x: Tensor, y: Tensor, max_norm: float) -> Verdict:
    """Every sample's gradient, and what the demo has computed from them, both ways."""

    def losses() -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    rows = flat(testing.definition(losses(), model))  # (B, all parameters)
    mean, weights = rows.mean(0), (max_norm / rows.norm(dim=1)).clamp(max=1)
    direction = split(mean, model)
    norms, dots, average, clipped = ps.reduce(
        losses(),
        model,
        ps.Norms(),
        ps.Dot(direction),
        ps.WeightedSum(torch.full((len(x),), 1 / len(x))),
        ps.ClippedSum(max_norm),
    )
    return Verdict(
        testing.check(losses, model),
        {
            "ps.Norms": error(norms, rows.norm(dim=1)),
            "ps.Dot": error(dots, rows @ mean),
            "ps.WeightedSum": error(flat(average, 0), mean),
            "ps.ClippedSum": error(flat(clipped, 0), weights @ rows),
        },
    )


def flat(by_name: dict[str, Tensor], dim: int = 1) -> Tensor:
    """All parameters beside each other, in double precision."""
    return torch.cat([t.double().flatten(dim) for t in by_name.values()], dim)


def split(vector: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The other way round."""
    params = dict(model.named_parameters())
    parts = vector.split([p.numel() for p in params.values()])
    return {name: part.view_as(p).to(p) for (name, p), part in zip(params.items(), parts, strict=True)}


def error(got: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the largest value; NaN counts as infinite."""
    difference = (got.double() - want.double()).abs().nan_to_num(nan=torch.inf).max()
    return float(difference / want.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny))
