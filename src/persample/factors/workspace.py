"""Memory for temporaries: how much may be used at a time, and the same pages again for every factor."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from ..kernels.pages import recycled

__all__ = ["Workspace"]

_USUAL = 2**24  # for one pass over the samples, more memory is not faster
_MOST = 2**28  # if nobody has said


class Workspace:
    """Scratch memory of at most ``limit`` bytes, but one sample's gradient always fits."""

    def __init__(self, limit: int | None = None, usual: int = _USUAL) -> None:
        self.limit = _MOST if limit is None else limit
        self._usual = usual
        self._pages: dict[torch.device, Tensor] = {}
        self._whole: Workspace | None = None

    def whole(self) -> Workspace:
        """More scratch memory, as much as is allowed: for work that is repeated once per chunk."""
        if self._whole is None:
            self._whole = Workspace(self.limit, self.limit)
        return self._whole

    def chunks(self, count: int, bytes_each: int, least: int = 1) -> Iterator[slice]:
        """``count`` samples or elements in slices, each with as many as fit, but with ``least`` of them."""
        step = max(least, 1, min(count, min(self.limit, self._usual) // max(1, bytes_each)))
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor, valid until the next one is taken."""
        size = prod(shape) * dtype.itemsize
        page = self._pages.get(device)
        if page is None or len(page) < size:
            self._pages.pop(device, None)
            page = self._pages[device] = recycled((size,), torch.uint8, device)
        return page[:size].view(dtype).view(shape)
