"""Which private runs there were in this process: their accounts do not add up by themselves."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from .errors import PrivacyWarning
from .ledger import Ledger


class Runs:
    """Remembers, for as long as models and datasets live, which runs have trained the one on the other."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, Ledger]] = {}  # by the ids of an object and of a ledger

    def enter(self, ledger: Ledger, model: nn.Module, data: Any) -> list[Ledger]:
        """Note a run, and find what others have spent: the furthest ledger of each run with the same model or data."""
        furthest: dict[str, Ledger] = {}
        for one in [*_trained(model), data]:
            ledgers = self._ledgers(one)
            for other in ledgers.values():
                known = furthest.get(other.run)
                if other.run != ledger.run and other.steps > (0 if known is None else known.steps):
                    furthest[other.run] = other
            ledgers[id(ledger)] = ledger
        return list(furthest.values())

    def _ledgers(self, one: object) -> dict[int, Ledger]:
        key = id(one)
        if key not in self._of:
            try:
                weakref.finalize(one, self._of.pop, key, None)
            except TypeError:  # a list, a range
                return {}
            self._of[key] = {}
        return self._of[key]


RUNS = Runs()


def warn_of(earlier: list[Ledger], ledger: Ledger) -> bool:
    """Say what the runs have spent together, by basic composition; whether there is anything to say."""
    if not earlier or not ledger.plan.noise:
        return False
    runs = "an earlier run" if len(earlier) == 1 else f"{len(earlier)} earlier runs"
    known, together = _spent(earlier, ledger)
    warnings.warn(
        f"{runs} in this process had the same model or dataset{known}. This run counts itself alone; for examples that "
        f"were in all of them, {together}. To have one account, plan all steps together and go on with one dp.Private, "
        f"or resume it from its file",
        PrivacyWarning,
        stacklevel=3,
    )
    return True


def _spent(earlier: list[Ledger], ledger: Ledger) -> tuple[str, str]:
    """What is known of the earlier runs, and of all together."""
    deltas = [one.plan.delta for one in earlier if one.plan.delta is not None]
    if ledger.plan.delta is None or len(deltas) < len(earlier):
        return "", "the epsilons and the deltas of all runs add up"
    epsilon, delta = sum(one.spent() for one in earlier), sum(deltas)
    together = f"epsilon is up to {epsilon + ledger.plan.budget:.4g} at delta {delta + ledger.plan.delta:g}"
    return f", and spent epsilon {epsilon:.4g} at delta {delta:g}", together


def _trained(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold trainable parameters, which do not depend on what wraps the model."""
    for module in model.modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            yield module
