"""Memory for temporaries: how much may be used at a time, and the same pages again for every factor."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

__all__ = ["Workspace"]

_USUAL = 2**24  # larger scratch memory is no faster


class Workspace:
    """Scratch memory of at most ``limit`` bytes (None: a moderate default), but one sample's gradient always fits."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = _USUAL if limit is None else min(limit, _USUAL)
        self._pages: dict[torch.device, Tensor] = {}
        self._second: Workspace | None = None

    def second(self) -> Workspace:
        """Another one of the same size, for two factors at a time."""
        if self._second is None:
            self._second = Workspace(self.limit)
        return self._second

    def chunks(self, batch: int, bytes_each: int) -> Iterator[slice]:
        """The batch in slices, each with as many samples as fit."""
        step = max(1, min(batch, self.limit // max(1, bytes_each)))
        return (slice(start, min(start + step, batch)) for start in range(0, batch, step))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor, valid until the next one is taken."""
        size = prod(shape) * dtype.itemsize
        page = self._pages.get(device)
        if page is None or len(page) < size:
            self._pages.pop(device, None)
            page = self._pages[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return page[:size].view(dtype).view(shape)
