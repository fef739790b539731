"""Gaussian noise on a grid.

Sums on the CPU are worked on block by block. Those on an accelerator stay there, and noise is made beside them
(`on_device`). Where a seed decides, or noise is correlated, it is drawn on the host and copied: in blocks that do not
depend on where it is added, so that rounding and adding in float64 give the same numbers there, bit by bit. Only where
a device has no float64 sums are copied to the host and back.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.devices import has_float64
from .correlated.memory import Memory
from .normals import Numbers
from .sources import Source

BLOCK = 2**18  # numbers at a time, which are one thread's, and have a stream of their own
_AT_A_TIME = 16  # blocks whose noise is copied to an accelerator at once
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
    Correlated noise begins with independent noise that is larger by a ``factor``.

    Not covered: tails (beyond eight standard deviations, normals made from 52-bit uniforms may lie further apart than
    the grid, and they end before 14), and the time that all this takes.
    """

    sensitivity: float
    noise_multiplier: float
    size: int
    factor: float = 1.0

    @property
    def grid(self) -> float:
        """The distance of neighbouring values."""
        share = self.sensitivity * _SHARE / math.sqrt(max(self.size, 1))
        return math.ldexp(1.0, math.frexp(share)[1] - 1)

    @property
    def std(self) -> float:
        """The standard deviation of the independent noise on each coordinate."""
        whole = self.sensitivity + self.grid * math.sqrt(self.size)
        return self.noise_multiplier * whole * self.factor


class Sum(NamedTuple):
    """Numbers in a unit, in a contiguous tensor; where they go with noise, over a divisor: by default in their place.

    The numbers may be overwritten in any case.
    """

    numbers: Tensor
    unit: float = 1.0  # a power of two
    into: Tensor | None = None  # of any real dtype
    divisor: float = 1.0

    def flat(self) -> Sum:
        """The same in one dim, of real numbers."""
        numbers, into = (_flat(t) for t in (self.numbers, self.numbers if self.into is None else self.into))
        return self._replace(numbers=numbers, into=into)

    @property
    def goal(self) -> Tensor:
        """Where the result goes."""
        return self.numbers if self.into is None else self.into

    def part(self, start: int, stop: int) -> Sum:
        """A range of numbers, of those that are `flat`."""
        return self._replace(numbers=self.numbers[start:stop], into=self.goal[start:stop])


def _flat(t: Tensor) -> Tensor:
    if not t.is_contiguous():
        raise ValueError("noise is added in place, to contiguous tensors")
    return (torch.view_as_real(t) if t.is_complex() else t).detach().view(-1)


_STREAM = 2**40  # blocks between the noise of one process and the next


def add_noise(
    sums: Sequence[Tensor | Sum],
    scale: Scale,
    source: Source,
    step: int,
    stream: int = 0,
    memory: Memory | None = None,
    first_block: int = 0,
) -> None:
    """Round the sums to the grid and add the noise of one step, in place or to where they are to go.

    Processes that each add noise to a part of the sums use a ``stream`` of their own, or one stream from different
    blocks on. Numbers are worked on in float64 and blocks that do not depend on how many threads share the work. With a
    ``memory``, noise is correlated with that of earlier steps.
    """
    if scale.noise_multiplier == 0:
        return
    flat = [(each if isinstance(each, Sum) else Sum(each)).flat() for each in sums]
    noise = Noise(scale, source, step, stream * _STREAM + first_block, memory)
    if any(each.numbers.device.type != "cpu" for each in flat):
        _add_elsewhere(flat, noise)
    else:
        blocks = list(_blocks(flat, BLOCK))
        _for_each(lambda block: _add_by_numpy(blocks[block], noise, block), range(len(blocks)))
    if memory is not None:
        memory.advance()


def shares(size: int, processes: int) -> list[range]:
    """For every process the numbers that it makes noise for: whole blocks, as many for each as can be."""
    each = BLOCK * -(-size // (BLOCK * processes))
    return [range(min(size, place * each), min(size, place * each + each)) for place in range(processes)]


def blocks_before(number: int) -> int:
    """How many blocks end before a number with which a share begins."""
    return -(-number // BLOCK)


@dataclass(frozen=True)
class Noise:
    """The noise of one step, block by block."""

    scale: Scale
    source: Source
    step: int
    first: int  # the number of the first block
    memory: Memory | None

    def fill(self, out: Numbers, block: int) -> None:
        """Write a block of noise, in steps of the grid."""
        self.source.normals(self.step, self.first + block, out)
        out *= self.scale.std / self.scale.grid
        start = block * BLOCK
        if self.memory is not None:
            out -= self.memory.due(start, start + len(out))
        np.rint(out, out=out)
        if self.memory is not None:
            self.memory.keep(start, out)

    def is_made_on(self, device: torch.device) -> bool:
        """Is it made on the device that it is for? What is remembered of earlier noise is on the host."""
        return self.memory is None and self.source.draws_on(device)

    def made_on(self, device: torch.device, size: int) -> Tensor:
        """Noise in steps of the grid, made on a device."""
        return self.source.normals_on(device, size).mul_(self.scale.std / self.scale.grid).round_()


def _for_each(do: Callable[[int], None], blocks: Sequence[int]) -> None:
    """Do it for every block, in as many threads as pay, of which this is one."""
    workers, left, lock = max(1, min(torch.get_num_threads(), len(blocks))), iter(blocks), threading.Lock()

    def taken() -> int | None:
        with lock:
            return next(left, None)

    def do_some() -> None:
        while (block := taken()) is not None:  # whoever has time: PyTorch's own threads may still spin on a core
            do(block)

    others = [_threads(workers - 1).submit(do_some) for _ in range(1, workers)]
    try:
        do_some()
    finally:
        wait(others)
    for other in others:
        other.result()  # raises what it has raised


@lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads that are kept, as starting one takes as long as a block."""
    return ThreadPoolExecutor(count, thread_name_prefix="noise")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a fork has none of them


def _add_by_numpy(parts: Sequence[Sum], noise: Noise, block: int) -> None:
    """Add by NumPy, whose threads are started here: PyTorch would start more inside of each."""
    noisy, values = _buffers(sum(len(part.numbers) for part in parts))
    noise.fill(noisy, block)
    grid, ends = noise.scale.grid, np.cumsum([len(part.numbers) for part in parts]).tolist()
    for part, end in zip(parts, ends, strict=True):
        numbers = part.numbers.numpy()
        np.multiply(numbers, part.unit / grid, out=values[end - len(numbers) : end])
    np.rint(values, out=values)
    noisy += values
    for part, end in zip(parts, ends, strict=True):
        goal = part.goal.numpy()  # the tensor itself
        some = noisy[end - len(goal) : end]
        if part.divisor == 1:
            np.multiply(some, grid, out=goal, casting="same_kind")
        else:
            np.divide(some, part.divisor / grid, out=goal, casting="same_kind")  # rounded as if it were done in two


def _add_elsewhere(flat: Sequence[Sum], noise: Noise) -> None:
    """Add noise to sums that are not all on the CPU: many blocks at a time, in memory that is written once."""
    grid = noise.scale.grid
    for turn, parts in enumerate(_blocks(flat, _AT_A_TIME * BLOCK)):
        devices = [part.numbers.device for part in parts]
        places = [device if has_float64(device) else torch.device("cpu") for device in devices]
        drawn = _drawn(noise, turn * _AT_A_TIME, sum(len(part.numbers) for part in parts), set(places))
        for part, place, each in zip(parts, places, drawn.split([len(part.numbers) for part in parts]), strict=True):
            sums = part.numbers.to(place, torch.float64)  # the part itself, if it is like that
            sums.mul_(part.unit / grid).round_().add_(each.to(place)).mul_(grid)
            if part.divisor != 1:
                sums.div_(part.divisor)
            if sums is not part.goal:
                part.goal.copy_(sums)


def _drawn(noise: Noise, first: int, size: int, devices: set[torch.device]) -> Tensor:
    """Noise from a block on: on the device, if there is one for all of it, and else on the host.

    The copy to CUDA is not waited for: PyTorch does not use pinned memory again before a copy from it is done.
    """
    if len(devices) == 1 and noise.is_made_on(device := next(iter(devices))):
        return noise.made_on(device, size)
    pinned = {device.type for device in devices} == {"cuda"}
    drawn = torch.empty(size, dtype=torch.float64, device="cpu", pin_memory=pinned)
    blocks = [block.numpy() for block in drawn.split(BLOCK)]
    _for_each(lambda place: noise.fill(blocks[place], first + place), range(len(blocks)))
    return drawn.to(next(iter(devices)), non_blocking=pinned) if len(devices) == 1 else drawn


_kept = threading.local()


def _buffers(size: int) -> tuple[Numbers, Numbers]:
    """Buffers that a thread uses again and again: fresh pages cost more than what is written into them."""
    if not hasattr(_kept, "buffers"):
        _kept.buffers = np.empty((2, BLOCK))
    return _kept.buffers[0, :size], _kept.buffers[1, :size]


def _blocks(flat: Sequence[Sum], size: int) -> Iterator[list[Sum]]:
    """Slices of the sums, put end to end, in blocks of equal size; the last one may be smaller."""
    block: list[Sum] = []
    room = size
    for each in flat:
        start = 0
        while start < len(each.numbers):
            part = each.part(start, start + room)
            block.append(part)
            start, room = start + len(part.numbers), room - len(part.numbers)
            if not room:
                yield block
                block, room = [], size
    if block:
        yield block
