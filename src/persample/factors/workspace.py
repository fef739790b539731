"""Scratch memory for temporaries: how much a computation may use at a time, in pages that all factors share."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from ..kernels.devices import launches_cost
from ..kernels.differentiable import is_differentiable
from ..kernels.pages import recycled
from ..numberless import faking

__all__ = ["Workspace"]

_CHUNK = 2**24  # bytes; for one pass over the samples, more memory is not faster on a CPU
_UNBOUNDED = 2**62  # bytes
_DEFAULT_LIMIT = 2**28  # bytes


class Workspace:
    """Scratch memory of at most ``limit`` bytes, but one sample's gradient always fits."""

    def __init__(self, limit: int | None = None, chunk: int = _CHUNK) -> None:
        self.limit = _DEFAULT_LIMIT if limit is None else limit
        self._chunk = chunk  # bytes that are usually used at a time
        self._pages: dict[torch.device, Tensor] = {}
        self._up_to_limit: Workspace | None = None

    @classmethod
    def on(cls, device: torch.device, limit: int | None) -> Workspace:
        """A workspace as a device likes it: all of the limit at a time, where every chunk costs launches."""
        return cls(limit, _UNBOUNDED) if launches_cost(device) else cls(limit)

    def up_to_limit(self) -> Workspace:
        """Another workspace that uses all of the limit: for work whose cost grows with the number of chunks."""
        if self._up_to_limit is None:
            self._up_to_limit = Workspace(self.limit, self.limit)
        return self._up_to_limit

    def chunks(self, count: int, bytes_each: int, least: int = 1, most: int | None = None) -> Iterator[slice]:
        """Slices of ``count`` samples or elements, each with as many as fit into memory, but at least ``least``."""
        fitting = min(self.limit, self._chunk) // max(1, bytes_each)
        step = max(least, 1, min(count, fitting if most is None else min(fitting, most)))
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """`take`, for results that can do without: None in a graph, or if they are kept for one."""
        return None if faking() or is_differentiable() else self.take(shape, dtype, device)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor, valid until the next one is taken."""
        if faking():  # in a graph, bytes that are seen as numbers would be copied back and forth
            return torch.empty(shape, dtype=dtype, device=device)
        size = prod(shape) * dtype.itemsize
        page = self._pages.get(device)
        if page is None or len(page) < size:
            self._pages.pop(device, None)
            page = self._pages[device] = recycled((size,), torch.uint8, device)
        return page[:size].view(dtype).view(shape)
