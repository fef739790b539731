"""Batches in a fixed order, of which some can be left out without being loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset


def check_order(loader: Any) -> None:
    """Refuse what could give other batches the next time."""
    if isinstance(loader, DataLoader):
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        name = type(sampler).__name__
        if "Random" in name:
            raise ValueError(
                f"the loader shuffles ({name}), so that places in the data would mean nothing: pass a DataLoader with "
                f"shuffle=False"
            )
        if "Distributed" in name:
            raise ValueError(
                f"the loader gives every process its own part ({name}): pass every process the same DataLoader, "
                f"without a sampler"
            )
    elif isinstance(loader, Iterator):
        raise TypeError(
            f"loader is a {type(loader).__name__}, which can be gone through once only: pass "
            f"a list of batches or a DataLoader"
        )
    elif not isinstance(loader, Iterable):
        raise TypeError(f"loader must be an iterable of batches, such as a DataLoader, not {type(loader).__name__}")


def length(loader: Any) -> int | None:
    """The number of batches, where the loader knows."""
    try:
        return len(loader)
    except TypeError:
        return None


def first_batch(loader: Any, place: int = 0) -> Any:
    """The first batch, or the one at another place; None if the loader has not so many."""
    return next((batch for _, batch in batches(loader, lambda number: number == place)), None)


def batches(loader: Any, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Any]]:
    """Numbered batches, of which only those that are wanted are loaded, if the loader allows that."""
    total = length(loader)
    if isinstance(loader, Sequence):
        yield from ((number, loader[number]) for number in range(len(loader)) if wanted(number))
        return
    if _can_skip(loader) and total is not None:
        numbers = [number for number in range(total) if wanted(number)]
        if len(numbers) < total:
            yield from zip(numbers, _some(loader, set(numbers)), strict=True)
            return
    yield from ((number, batch) for number, batch in enumerate(loader) if wanted(number))


def _can_skip(loader: Any) -> bool:
    """Do a DataLoader's batches go by indices alone?

    Those of an IterableDataset have endless indices without a meaning; a subclass may change batches on their way.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader).__iter__ is not DataLoader.__iter__:
        return False
    return type(loader.batch_sampler) is BatchSampler


def _some(loader: DataLoader[Any], numbers: set[int]) -> Iterator[Any]:
    assert loader.batch_sampler is not None
    chosen = [indices for number, indices in enumerate(loader.batch_sampler) if number in numbers]
    return iter(
        DataLoader(
            loader.dataset,
            batch_sampler=chosen,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
        )
    )
