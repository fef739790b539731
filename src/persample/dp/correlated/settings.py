"""Which mechanisms go with which sampling, and what a plan may say of them."""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol, get_args

Sampling = Literal["poisson", "shuffled", "cyclic"]
MechanismName = Literal["gaussian", "banded", "blt"]


class Settings(Protocol):
    """The part of a plan that this is about."""

    @property
    def examples(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def mechanism(self) -> MechanismName: ...
    @property
    def bands(self) -> int | None: ...
    @property
    def buffers(self) -> int | None: ...
    @property
    def momentum(self) -> float: ...


def check_settings(plan: Settings, solves_steps: bool) -> None:
    """Refuse what is not a mechanism, or not one that can be accounted for."""
    for name, known in (("sampling", Sampling), ("mechanism", MechanismName)):
        if getattr(plan, name) not in get_args(known):
            raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, not {getattr(plan, name)!r}")
    _check_numbers(plan)
    _check_sampling(plan)
    if plan.mechanism == "banded" and plan.bands is None and solves_steps:
        raise ValueError("which bands are best depends on the number of steps: give steps or epochs, or bands")
    if plan.mechanism == "blt" and solves_steps:
        raise ValueError("mechanism='blt' is optimised for a number of steps: give steps or epochs")


def _check_numbers(plan: Settings) -> None:
    for name, mechanism in (("bands", "banded"), ("buffers", "blt")):
        value = getattr(plan, name)
        if value is not None and plan.mechanism != mechanism:
            raise ValueError(f"{name}={value!r} is for mechanism={mechanism!r}, not {plan.mechanism!r}")
        if value is not None and not (_is_whole(value) and value >= 1):
            raise ValueError(f"{name} must be a positive integer, not {value!r}")
    if not isinstance(plan.momentum, (int, float)) or isinstance(plan.momentum, bool) or not 0 <= plan.momentum < 1:
        raise ValueError(f"momentum must be a number from 0 to below 1, not {plan.momentum!r}")


def _check_sampling(plan: Settings) -> None:
    if plan.mechanism == "banded" and plan.sampling == "shuffled":
        raise ValueError(
            "sampling='shuffled' may show an example in two steps in a row, which correlated noise does not cover: use "
            "sampling='poisson' or 'cyclic'"
        )
    if plan.mechanism == "blt" and plan.sampling != "cyclic":
        raise ValueError(
            f"mechanism='blt' correlates noise over all steps, so that nothing is known to be gained by sampling, and "
            f"examples have to come at fixed distances: use sampling='cyclic', not {plan.sampling!r}, or "
            f"mechanism='banded'"
        )
    if (plan.bands or 1) > most_bands(plan):
        raise ValueError(
            f"bands {plan.bands} are too many for batches of {plan.batch_size} of {plan.examples} examples: each comes "
            f"from another part of them, and there are {most_bands(plan)} at most"
        )


def most_bands(plan: Settings) -> int:
    """In how many successive steps an example need not be twice."""
    ratio = plan.examples / plan.batch_size
    return math.ceil(ratio) if plan.sampling == "cyclic" else math.floor(ratio)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
