"""What is taken over from a DataLoader: its length, batch size and options, but not its sampling."""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

_OPTIONS = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)
_OF_WORKERS = ("timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")


def planned(loader: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a plan for the examples, batches and epochs of a loader."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"a plan can be like a DataLoader, not like a {type(loader).__name__}: use dp.Plan(examples=...)"
        )
    check_loader(loader)
    for name in ("examples", "batch_size"):
        if name in settings:
            raise ValueError(f"{name} is the loader's: leave it out, or use dp.Plan(...) without a loader")
    for name in ("users", "items_per_user"):
        if settings.get(name) is not None:
            raise ValueError(
                f"{name} cannot be taken from a loader, whose batches are of items: use dp.Plan(users=...)"
            )
    found = {"examples": len(loader.dataset), "batch_size": loader.batch_size, **settings}  # type: ignore[arg-type]
    if settings.get("sampling", "poisson") != "poisson":
        if loader.drop_last:
            raise ValueError(
                f"the loader drops its last batch, but with sampling={settings['sampling']!r} an epoch has every "
                f"example: use drop_last=False"
            )
        return found
    epochs = settings.get("epochs")
    if isinstance(epochs, (int, float)) and not isinstance(epochs, bool) and 0 < epochs < math.inf:
        if settings.get("steps") is not None:
            return found  # which is refused by name
        found = {**found, "epochs": None, "steps": max(1, math.ceil(epochs * len(loader) - 1e-9))}
    return found


def check_loader(loader: DataLoader[Any]) -> None:
    """Refuse a loader that does more than to load single examples, each as likely as another."""
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"private training needs a map-style dataset, to sample every example with the same probability, but a "
            f"{type(loader.dataset).__name__} has no length and no items by index"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"a {type(loader).__name__} has an __iter__ of its own, which would not be called: pass its .dataset, and "
            f"do in the loop what it does to a batch"
        )
    if loader.batch_size is None:
        raise ValueError("the loader makes no batches of a stated size: give it a batch_size, or use dp.Plan(...)")
    sampler = loader.sampler
    plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    plain = plain and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    if not plain:
        raise ValueError(
            f"the loader samples by a {type(sampler).__name__}, but batches are drawn as the plan's accounting "
            f"assumes, every example as likely as another: use a loader without it. (Several processes share "
            f"the batches by themselves; for a part of a dataset, use torch.utils.data.Subset)"
        )


def taken_apart(data: Any, batch_size: int | None) -> tuple[Any, dict[str, Any]]:
    """The dataset of a loader, and its options; anything else as it is.

    The loader's batches must be of this size, if one is given.
    """
    if not isinstance(data, DataLoader):
        return data, {}
    check_loader(data)
    if batch_size not in (None, data.batch_size):
        raise ValueError(
            f"the plan is for batches of {batch_size}, but the loader's have {data.batch_size}: make the plan by "
            f"dp.Plan.like(loader, ...), or pass the loader's .dataset"
        )
    return data.dataset, {name: getattr(data, name) for name in _OPTIONS}


def merged(of_loader: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """A loader's options, and others in their place; those of workers only where there are some."""
    found = {**of_loader, **options}
    if not found.get("num_workers"):
        found = {name: value for name, value in found.items() if name in options or name not in _OF_WORKERS}
    return found
