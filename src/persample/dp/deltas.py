"""With which probability a promise may fail: a plan says so, or whoever asks what a run has spent."""

from __future__ import annotations

import warnings


def check_delta(delta: object) -> None:
    """Refuse what is no probability, or one that allows everything or nothing."""
    if not isinstance(delta, float) or not 0 < delta < 1:
        raise ValueError(f"delta must be a number between 0 and 1, not {delta!r}")


def check_needed(delta: float | None, missing: list[str]) -> None:
    """Refuse plans without a delta but those with a length and noise, which solve for nothing then."""
    if delta is None and missing != ["epsilon"]:
        raise ValueError(
            "an epsilon is promised at a delta: give it, far below 1 / examples. A plan of length and noise_multiplier "
            "can do without both: private.spent(delta=...) says what is spent"
        )


def asked(of_plan: float | None, delta: float | None) -> float:
    """The delta at which epsilon is asked for; by default the plan's."""
    found = of_plan if delta is None else delta
    if found is None:
        raise ValueError("the plan has no delta: say at which one epsilon is asked for, spent(delta=1e-5)")
    check_delta(found)
    return found


def warn_of_large(delta: float, examples: int, one: str) -> None:
    """Still a promise, and published results use 1 / examples: said loudly, not refused."""
    if delta >= 1 / examples:
        warnings.warn(
            f"delta {delta:g} is not below 1 / {one}s = {1 / examples:g}: publishing one {one} in full would keep such "
            f"a promise. Choose a delta far below that",
            stacklevel=4,
        )
