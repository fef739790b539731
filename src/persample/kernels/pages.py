"""Large blocks of memory on the CPU, where a page that is touched for the first time costs more than what is written.

`recycled` memory, for temporaries, lies in mappings that are kept from call to call. A mapping is used again once no
tensor lies in it any more; a tensor that outlives its call only delays that. `fresh` memory, for results, belongs to
one tensor and lies in huge pages, of which there are five hundred times fewer to be touched. On other devices both are
`torch.empty`: their allocators keep memory themselves. So they are while tensors are fake, and need none.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from math import prod
from threading import Lock

import torch
from torch import Tensor

from ..numberless import faking

__all__ = ["POOL", "empty_cache", "fresh", "recycled"]

_LEAST = 2**20  # bytes; the C library recycles smaller blocks itself
_LEAST_FRESH = 2**22  # a huge page has 2**21; said in docs/reductions.md and by `ps.grad`
_CALLS = 4  # a page that was used in one of so many last calls is kept
_HUGE = hasattr(mmap, "MADV_HUGEPAGE")


def recycled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor for temporaries, in memory that is used again when the tensor is gone."""
    size = prod(shape) * dtype.itemsize
    if size >= _LEAST and device.type == "cpu" and _HUGE and not faking():
        with suppress(OSError):  # too many mappings
            return POOL.take(size).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


def fresh(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor for results. If it is large, its storage is not PyTorch's, and cannot be made larger."""
    size = prod(shape) * dtype.itemsize
    if size >= _LEAST_FRESH and device.type == "cpu" and _HUGE and not faking():
        with suppress(OSError):
            storage = torch.frombuffer(_mapped(size), dtype=torch.uint8).untyped_storage()
            strides = torch.empty(shape, device="meta").stride()
            return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, strides)
    return torch.empty(shape, dtype=dtype, device=device)


def _mapped(size: int) -> mmap.mmap:
    """Private memory, in huge pages where there are any; it is unmapped with the last reference to it."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Page:
    """A large mapping (of many of the system's pages), to which every storage in it holds a reference."""

    __slots__ = ("_idle_references", "last_call", "memory")

    def __init__(self, size: int) -> None:
        self.memory = _mapped(size)
        self.last_call = 0  # the last one that used it
        self._idle_references = sys.getrefcount(self.memory)

    @property
    def is_idle(self) -> bool:
        """Whether no tensor lies in it any more."""
        return sys.getrefcount(self.memory) == self._idle_references


class Pool:
    """Pages to be used again, by any thread."""

    def __init__(self) -> None:
        self._pages: list[_Page] = []
        self._call = 0
        self._lock = Lock()

    def begin_call(self) -> None:
        """Release pages that the last calls have not used."""
        with self._lock:
            self._call += 1
            self._pages = [p for p in self._pages if p.last_call > self._call - _CALLS]

    def empty(self) -> None:
        """Release all pages; those with tensors in them are unmapped with the last tensor."""
        with self._lock:
            self._pages = []

    @property
    def nbytes(self) -> int:
        """The size of all pages, idle or not."""
        return sum(len(p.memory) for p in self._pages)

    def take(self, size: int) -> Tensor:
        """(size,) bytes in the smallest idle page that is not twice as large, or in a new one."""
        with self._lock:
            idle = [p for p in self._pages if size <= len(p.memory) <= 2 * size and p.is_idle]
            page = min(idle, key=lambda p: len(p.memory)) if idle else self._new(size)
            page.last_call = self._call
            return torch.frombuffer(page.memory, dtype=torch.uint8, count=size)

    def _new(self, size: int) -> _Page:
        """A new page, with its size rounded up so that a few more samples fit the next time."""
        step = 1 << max(size.bit_length() - 4, 12)
        page = _Page(-(-size // step) * step)
        self._pages.append(page)
        return page


POOL = Pool()


def empty_cache() -> None:
    """Release the memory that is kept on the CPU to be used again by the next call.

    >>> import persample as ps
    >>> ps.empty_cache()

    Temporaries are written into pages that earlier calls have used, because fresh ones are slow; what the last few
    calls did not use is released without being asked. Results own their memory.
    """
    POOL.empty()
