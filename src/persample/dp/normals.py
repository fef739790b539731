"""Normal numbers from random words, by the ziggurat (Marsaglia & Tsang 2000), many at a time.

The area under the density is cut into layers of equal size. A word of 64 bits chooses a layer by its last bits, and a
point on its width by the others; 997 of 1000 points lie under the density whatever their height, and are done. For the
few others the height is drawn, or the tail beyond the last layer, and what lies above the density is drawn again.

Nothing is approximated but by float64: points are 2**-53 of a layer's width apart, far closer than the grid to which
noise is rounded, heights have 52 bits, and the tail is that of the normal distribution as far as the logarithm of a
uniform number of 52 bits reaches, about 13 standard deviations.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Words = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Places = np.ndarray[Any, np.dtype[np.intp]]
Stream = Callable[[int], Words]  # so many random words, which are there until more are asked for

_LAYERS = 1024
_CHUNK = 2**18  # numbers at a time: with fewer, threads spend their time waiting for each other between short calls
_UNIT = 2.0**-52


class Layers(NamedTuple):
    """How wide layers are, from the bottom up; the lowest has the area of its part of the tail as further width."""

    widths: Numbers  # (n,), times 2**-63: of whole words
    within: Numbers  # (n,): the width that lies under the density whatever the height
    low: Numbers  # (n,): the density at the bottom and the top of the layer
    high: Numbers
    end: float  # of the lowest layer, where the tail begins


def _density(x: float) -> float:
    return math.exp(-0.5 * x * x)


def _edges(end: float) -> tuple[list[float], float]:
    """Right ends of layers above a first one that ends here, and the height left above the last, positive or not."""
    area = end * _density(end) + math.sqrt(math.pi / 2) * math.erfc(end / math.sqrt(2))
    edges, height = [area / _density(end), end], _density(end)
    while len(edges) < _LAYERS:
        height += area / edges[-1]
        if height >= 1:
            return edges, 1 - height - (_LAYERS - len(edges))
        edges.append(math.sqrt(-2 * math.log(height)))
    return edges, 1 - (height + area / edges[-1])


@cache
def layers() -> Layers:
    """All of them, which end at the top of the density."""
    low, high = 1.0, 10.0
    for _ in range(100):  # the further out the first one ends, the smaller all are
        middle = (low + high) / 2
        low, high = (middle, high) if _edges(middle)[1] < 0 else (low, middle)
    edges = np.array([*_edges(high)[0], 0.0])
    heights = np.exp(-0.5 * edges * edges)
    heights[0] = 0.0
    return Layers(edges[:-1] * 2.0**-63, edges[1:].copy(), heights[:-1], heights[1:], high)


def fill(out: Numbers, stream: Stream) -> None:
    """Write standard normal numbers. They depend on the stream's words alone."""
    table = layers()
    for start in range(0, len(out), _CHUNK):
        part = out[start : start + _CHUNK]
        places = _try(part, stream, table)
        while len(places):
            again = np.empty(len(places))
            left = _try(again, stream, table)
            part[places] = again
            places = places[left]


def _try(out: Numbers, stream: Stream, table: Layers) -> Places:
    """Write numbers; returns the places of those that have to be drawn again."""
    which, edges, far, outside = _buffers(len(out))
    words = stream(len(out))
    np.bitwise_and(words, _LAYERS - 1, out=which)
    _look_up(table.widths, which, edges)
    np.multiply(words, edges, out=out)
    _look_up(table.within, which, edges)
    np.greater_equal(np.abs(out, out=far), edges, out=outside)
    places: Places = np.flatnonzero(outside)
    if not len(places):
        return places
    which, points = which[places], out[places]
    lowest = which == 0
    tail = np.copysign(_beyond(table.end, int(lowest.sum()), stream), points[lowest])
    out[places[lowest]] = tail
    height = table.low[which] + _uniforms(len(places), stream) * (table.high[which] - table.low[which])
    above: Places = places[~lowest & (height >= np.exp(-0.5 * points * points))]
    return above


def _look_up(table: Numbers, places: Words, out: Numbers) -> None:
    """By PyTorch, in this thread alone: NumPy's own takes half as long again."""
    torch.index_select(torch.from_numpy(table), 0, torch.from_numpy(places), out=torch.from_numpy(out))


def _beyond(end: float, count: int, stream: Stream) -> Numbers:
    """Numbers of the tail that begins there (Marsaglia 1964): each is tried again until it is one of the tail."""
    found, places = np.empty(count), np.arange(count)
    while len(places):
        further = -np.log(_uniforms(len(places), stream)) / end
        found[places] = end + further
        places = places[-2 * np.log(_uniforms(len(places), stream)) <= further * further]
    return found


def _uniforms(count: int, stream: Stream) -> Numbers:
    """Between 0 and 1, and neither of them."""
    found: Numbers = (stream(count) >> 12).astype(np.float64)
    found += 2.0**51 + 0.5  # exact
    found *= _UNIT
    return found


_kept = threading.local()


def _buffers(size: int) -> tuple[Words, Numbers, Numbers, Flags]:
    """Buffers that a thread uses again and again."""
    if not hasattr(_kept, "buffers"):
        _kept.buffers = np.empty(_CHUNK, dtype=np.int64), np.empty((2, _CHUNK)), np.empty(_CHUNK, dtype=np.bool_)
    whole, real, flags = _kept.buffers
    return whole[:size], real[0, :size], real[1, :size], flags[:size]
