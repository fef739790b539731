"""Gaussian noise on a grid."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .sources import Numbers, Source

_BLOCK = 2**16  # numbers at a time: they stay in the cache, and each block has a stream of its own
_FEWEST = 4  # blocks for each thread at least: starting one takes as long as a block
_SHARE = 2.0**-12  # what rounding to the grid may add to the sensitivity, relatively


@dataclass(frozen=True)
class Scale:
    """How much noise, and on which grid: all of it follows from public numbers.

    Naive Gaussian noise in floating point leaks: which numbers ``sum + noise`` can be depends on the sum (Mironov 2012;
    Jin et al. 2022). Here both are rounded to multiples of one power of two first, in float64. Every multiple can then
    come about with any data, and as rounding the noise to the grid on which the sum lies is rounding their sum, the
    result is a function of the ideal Gaussian mechanism's.

    Rounding moves a coordinate of either of two neighbouring sums by half a step of the grid at most, hence their
    difference by ``grid · √size``: this is added to the sensitivity, and the noise grows with it (by less than 0.03%).
    The sums themselves are exact, and what clipping rounds is within the bound (`persample.factors.integer_sums`).

    Not covered: tails (normals made from 53-bit uniforms end between 8 and 14 standard deviations), and the time that
    all this takes.
    """

    sensitivity: float
    noise_multiplier: float
    size: int

    @property
    def grid(self) -> float:
        """The distance of neighbouring values."""
        share = self.sensitivity * _SHARE / math.sqrt(max(self.size, 1))
        return math.ldexp(1.0, math.frexp(share)[1] - 1)

    @property
    def std(self) -> float:
        """The standard deviation of the noise on each coordinate."""
        whole = self.sensitivity + self.grid * math.sqrt(self.size)
        return self.noise_multiplier * whole


_STREAM = 2**40  # blocks between the noise of one process and the next


def add_noise(sums: Sequence[Tensor], scale: Scale, source: Source, step: int, stream: int = 0) -> None:
    """Round the sums to the grid and add the noise of one step, in place.

    Processes that each add noise to a part of the sums use a ``stream`` of their own. Numbers are worked on in float64
    and blocks that do not depend on how many threads share the work.
    """
    if scale.noise_multiplier == 0:
        return
    if any(not t.is_contiguous() for t in sums):
        raise ValueError("noise is added in place, to contiguous tensors")
    flat = [(torch.view_as_real(t) if t.is_complex() else t).view(-1) for t in sums]
    blocks = list(_blocks(flat))

    def fill(block: int) -> None:
        with torch.no_grad():  # a mode of every thread on its own
            _fill(blocks[block], scale, source, step, stream * _STREAM + block)

    workers = min(torch.get_num_threads(), len(blocks) // _FEWEST)
    if workers <= 1:
        for block in range(len(blocks)):
            fill(block)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(fill, range(len(blocks))))


def _fill(parts: Sequence[Tensor], scale: Scale, source: Source, step: int, block: int) -> None:
    """Fill by NumPy, whose threads are started here: PyTorch would start more inside of each."""
    size = sum(len(part) for part in parts)
    noisy, values = _buffers(size)
    staged = [part.detach().cpu().numpy() for part in parts]  # the parts themselves, where they are on the CPU
    source.normals(step, block, noisy)
    noisy *= scale.std / scale.grid
    np.rint(noisy, out=noisy)
    ends = np.cumsum([len(part) for part in parts]).tolist()
    for given, end in zip(staged, ends, strict=True):
        np.multiply(given, 1 / scale.grid, out=values[end - len(given) : end])
    np.rint(values, out=values)
    noisy += values
    for part, given, end in zip(parts, staged, ends, strict=True):
        np.multiply(noisy[end - len(given) : end], scale.grid, out=given, casting="same_kind")
        if part.device.type != "cpu":
            part.copy_(torch.from_numpy(given))


_kept = threading.local()


def _buffers(size: int) -> tuple[Numbers, Numbers]:
    """Buffers that a thread uses again and again: fresh pages cost more than what is written into them."""
    if not hasattr(_kept, "buffers"):
        _kept.buffers = np.empty((2, _BLOCK))
    return _kept.buffers[0, :size], _kept.buffers[1, :size]


def _blocks(flat: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Slices of the tensors, put end to end, in blocks of equal size; the last one may be smaller."""
    block: list[Tensor] = []
    room = _BLOCK
    for tensor in flat:
        start = 0
        while start < len(tensor):
            part = tensor[start : start + room]
            block.append(part)
            start, room = start + len(part), room - len(part)
            if not room:
                yield block
                block, room = [], _BLOCK
    if block:
        yield block
