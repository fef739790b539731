"""Timing of small models, or of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..audit import AuditError, Cost
from ..audit.costs import measure
from ..audit.models import MODELS
from ..audit.problem import first_losses
from ..audit.spec import load
from ..numberless import has_numbers
from .output import working


@dataclass(frozen=True, slots=True)
class Timed:
    """What one model costs."""

    name: str
    batch: int
    parameters: int
    costs: tuple[Cost, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def bench_all(
    specs: Sequence[str], *, batch_size: int | None, device: str | None, repeats: int, seed: int, quiet: bool
) -> list[Timed]:
    """Every SPEC or built-in model; all built-in ones if none is given."""
    timings = []
    names = specs or MODELS
    with working(len(names), quiet=quiet) as tell:
        for name in names:
            tell(name)
            spec = f"persample.audit.models:{name}" if name in MODELS else name
            problem = load(spec, batch_size=batch_size, seed=seed, device=device)
            losses = first_losses(problem)
            if not has_numbers(losses):
                raise AuditError(
                    f"{name} has no numbers to compute with, and so no time to measure: persample audit estimates its "
                    f"costs from shapes"
                )
            batch = len(losses)
            trained = sum(p.numel() for p in problem.model.parameters() if p.requires_grad)
            timings.append(Timed(name, batch, trained, measure(problem, repeats)))
    return timings
