"""What steps would cost, from shapes alone: for models whose tensors have no numbers, as they are on meta or fake.

Every op is run as it would be, and computes the shapes of its results. What these would take is added up, and given
back when the last tensor that lies in it is gone. Matrix products and convolutions are counted, by PyTorch's counter.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch.utils.flop_counter import FlopCounterMode

from .._errors import PerformanceWarning
from .._factories import in_words
from ..numberless import LiveBytes
from .costs import STEPS, Step
from .problem import Problem
from .words import size_in_words


@dataclass(frozen=True, slots=True)
class Estimate:
    """One way to take a step."""

    name: str
    flops: int | None = None  # of forward pass, backward and what is computed from it
    ratio: float | None = None  # to a plain step
    bytes_above: int | None = None  # how far memory rises above what the forward pass holds
    unknown: str = ""  # why there are no figures


def estimate(problem: Problem) -> tuple[tuple[Estimate, ...], int]:
    """Every step; and how many bytes the forward pass holds."""
    held, estimates = 0, list[Estimate]()
    with problem.untouched(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        forward = _forward_flops(problem)
        for name, step in STEPS.items():
            try:
                flops, held_now, above = _step(problem, step)
            except Exception as error:  # whatever it is, the report says so
                estimates.append(Estimate(name, unknown=in_words(error)))
                continue
            held, plain = max(held, held_now), estimates[0].flops if estimates else forward + flops
            ratio = (forward + flops) / plain if plain else None
            estimates.append(Estimate(name, forward + flops, ratio, above))
    return tuple(estimates), held


def _forward_flops(problem: Problem) -> int:
    with FlopCounterMode(display=False) as counter:
        problem.once()
    return int(counter.get_total_flops())


def _step(problem: Problem, step: Step) -> tuple[int, int, int]:
    """Operations after the forward pass, what that holds, and how far memory rises above it."""
    gc.collect()
    with LiveBytes() as memory:
        losses = problem.once()
        held = memory.begin_peak()
        with FlopCounterMode(display=False) as counter:
            kept = step(losses, problem.model)
        above = memory.peak - held
    del kept
    return counter.get_total_flops(), held, above


ESTIMATED = ("step", "operations", "to plain", "memory above forward")  # columns of a table


def estimated(estimates: Sequence[Estimate]) -> list[tuple[str, str, str, str]]:
    """Its rows."""
    return [
        (
            one.name,
            "unknown" if one.flops is None else f"{one.flops:.3g}",
            "" if one.ratio is None else f"{one.ratio:.2f}",
            size_in_words(one.bytes_above),
        )
        for one in estimates
    ]
