"""Noise drawn ahead: it depends on no data, so that it need not wait for them."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from .noise import BLOCK
from .normals import Numbers
from .sources import Source

_MOST = 2**21  # numbers that are kept for a release; for more, nobody has the memory or waits for anything else


def _has_idle_core() -> bool:
    """Are there more cores than PyTorch has threads? Otherwise both would wait for each other."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return torch.get_num_threads() < cores


class Early(Source):
    """A source whose noise for the next release is drawn by another thread, while gradients are computed.

    What is drawn is what the source would draw later. It is used for the release that it was drawn for, or never.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._drawing: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._process = os.getpid()  # a fork of it has no such thread
        self._drawn_for: tuple[int, bytes] | None = None  # a release, and the nonce of then
        self._kept = np.empty(0)

    def begin(self, number: int, size: int) -> None:
        """Draw so many numbers for a release, unless that is done already, they are too many, or all cores are busy."""
        if not 0 < size <= _MOST or self._drawn_for == (number, self.nonce) or not _has_idle_core():
            return
        self._finish()
        if self._process != os.getpid():
            self._process, self._thread = os.getpid(), None
        if len(self._kept) != size:
            self._kept = np.empty(size)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="noise")
        self._drawn_for = number, self.nonce
        self._drawing = self._thread.submit(self._draw, number)

    def _draw(self, number: int) -> None:
        for block, start in enumerate(range(0, len(self._kept), BLOCK)):
            self._source.normals(number, block, self._kept[start : start + BLOCK])

    def _finish(self) -> None:
        """Wait for the other thread, whatever became of it, and forget what it has drawn."""
        if self._drawing is not None and self._process == os.getpid():
            self._drawing.exception()
        self._drawing = self._drawn_for = None

    def normals(self, number: int, block: int, out: Numbers) -> None:
        start, here = block * BLOCK, self._process == os.getpid()
        if (
            self._drawing is None
            or not here
            or self._drawn_for != (number, self.nonce)
            or start + len(out) > len(self._kept)
        ):
            self._source.normals(number, block, out)
            return
        self._drawing.result()  # or what it has raised
        out[:] = self._kept[start : start + len(out)]

    def draws_on(self, device: torch.device) -> bool:
        return self._source.draws_on(device)

    def normals_on(self, device: torch.device, size: int) -> Tensor:
        return self._source.normals_on(device, size)

    @property
    def secret(self) -> bytes:
        return self._source.secret

    @property
    def nonce(self) -> bytes:
        """That of the source."""
        return self._source.nonce

    @nonce.setter
    def nonce(self, nonce: bytes) -> None:
        self._finish()
        self._source.nonce = nonce

    def uniforms(self, step: int, count: int) -> Numbers:
        return self._source.uniforms(step, count)

    def renew(self) -> None:
        self._finish()
        self._source.renew()
