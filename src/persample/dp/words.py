"""A plan as it prints itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .solve import LEAST_NOISE
from .units import items_in_words, name_of_one

if TYPE_CHECKING:
    from .plan import Plan

_IN_ITS_PLACE = "more or less, in its place"


def in_words(plan: Plan) -> str:
    """Length and sampling, noise, and the promise."""
    one, items = name_of_one(plan), items_in_words(plan)
    of = f"of {plan.batch_size} of {plan.examples} {one}s"
    how = {
        "poisson": (f"{of} on average{items}, Poisson sampling", "more or less"),
        "shuffled": (f"{of}{items}, shuffled every epoch", "replaced"),
        "cyclic": (f"{of}{items}, the same in every epoch", _IN_ITS_PLACE),
    }
    sampled, neighbours = how[plan.sampling]
    if plan.sampling == "poisson" and (plan.bands or 1) > 1:
        sampled, neighbours = f"{sampled} from {plan.bands} parts in turn", _IN_ITS_PLACE
    promise = f"no privacy: with{'out' if not plan.noise else ' so little'} noise, epsilon is infinite"
    by = f"({plan.accountant.upper()} accountant, neighbours: one {one} {neighbours})"
    if plan.delta is None and plan.noise:
        promise = f"no delta: spent(delta=...) has the epsilon {by}"
    elif plan.delta is not None and plan.budget < math.inf:
        promise = f"epsilon {plan.budget:.4g} at delta {plan.delta:g} {by}"
    noise = f"noise multiplier {plan.noise:.5g}{_correlation(plan)}{_stages(plan)}"
    return f"{plan.length} steps ({plan.epochs:.4g} epochs) {sampled}\n{noise}\n{promise}"


def _stages(plan: Plan) -> str:
    """How noise changes from step to step."""
    if plan.noise_schedule is None:
        return ""
    least, most = min(plan.noise_schedule), max(plan.noise_schedule)
    return f", times {least:.4g} to {most:.4g} in {len(plan.noise_schedule)} stages"


def _correlation(plan: Plan) -> str:
    """How noise is correlated, and what is gained by it."""
    if plan.mechanism == "gaussian":
        return ""
    name, count = ("band", plan.bands) if plan.mechanism == "banded" else ("buffer", plan.buffers)
    by = f"{count} {name}{'s' * (count != 1)}"
    return f", correlated by {by}\nexpected error of sums {plan.expected_error:.4g} sensitivities{_compared(plan)}"


def _compared(plan: Plan) -> str:
    """How much of DP-SGD's error is left, where there is one to compare with, whose noise is as little as can be."""
    try:
        other = plan.dp_sgd()
    except ValueError:  # so much noise that accountants round what it loses to nothing
        return ""
    return f", {plan.expected_error / other.expected_error:.4g} times DP-SGD's" if other.noise > LEAST_NOISE else ""
