"""The batches of a run, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from .ledger import Ledger
from .loaders import merged, taken_apart


def epochs(
    batches: Callable[..., Iterator[Any]], ledger: Ledger, data: Any, options: dict[str, Any]
) -> Iterator[Iterator[Any]]:
    """``batches`` of the epochs that are left, of a dataset or a DataLoader."""
    if "steps" in options:
        raise ValueError("steps are those of an epoch: for other numbers of them, use private.batches(steps=...)")
    plan = ledger.plan
    dataset, given = taken_apart(data, plan.batch_size if plan.users is None else None)
    per_epoch = plan.steps_per_epoch
    if dataset is not data and plan.sampling == "poisson" and plan.users is None:
        per_epoch = len(data)
    return _each(batches, ledger, dataset, per_epoch, merged(given, options))


def _each(
    batches: Callable[..., Iterator[Any]], ledger: Ledger, dataset: Any, per_epoch: float, options: dict[str, Any]
) -> Iterator[Iterator[Any]]:
    done = 0 if ledger.plan.sampling == "shuffled" else ledger.steps  # a pass cannot be taken up again
    for steps in lengths(done, done + ledger.left, per_epoch):
        yield batches(dataset, steps=steps, **options)


def lengths(done: int, steps: int, per_epoch: float) -> Iterator[int]:
    """How many steps each of the epochs has that are left: of one that was begun, those that are left of it."""
    epoch = math.floor(done / per_epoch + 1e-9)
    while done < steps:
        epoch += 1
        end = min(math.ceil(epoch * per_epoch - 1e-9), steps)
        if end > done:
            yield end - done
        done = max(done, end)
