"""Where samples may lie in a tensor: every dim, folded, across dims, in any order, with gaps."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from persample.graph.layout import NOBODY, Block, Labels, Layout, Shape, strides
from tests.graph.explicit import explicit

_LARGEST = 6  # samples


@lru_cache(maxsize=4096)
def places(shape: Shape) -> tuple[Layout, ...]:
    """Every kind of place, each with two samples or more."""
    return (*_blocks(shape), *_labels(shape))


def _blocks(shape: Shape) -> list[Layout]:
    """a·B·b in one dim for all a, B and b, then what lies in several dims."""
    found, steps, count = dict[Block, None](), strides(shape), prod(shape)
    for dim, n in enumerate(shape):
        for batch in (b for b in range(2, min(n, _LARGEST) + 1) if n % b == 0):
            for inner in (b for b in range(1, n // batch + 1) if n // batch % b == 0):
                found[Block(batch, inner * steps[dim])] = None
    across = [
        Block(batch, inner)
        for batch in range(2, _LARGEST + 1)
        for inner in range(1, count // batch + 1)
        if count and count % (batch * inner) == 0 and Block(batch, inner) not in found
    ]
    return [*found, *across[:2], *across[-1:]]


def _labels(shape: Shape) -> list[Layout]:
    """Any order, repeats, gaps: along each dim, two of them, all; then one sample's as a whole, and nobody's."""
    generator = torch.Generator().manual_seed(prod(shape))
    last = len(shape) - 1
    over = [{d} for d, n in enumerate(shape) if n > 1]
    over += [dims for dims in ({0, 1}, {last - 1, last}, {0, last}) if last > 0 and len(dims) == 2]
    over += [set(range(len(shape)))]
    found: list[Layout] = []
    for batch, dims in enumerate(over):
        sizes = [n if d in dims else 1 for d, n in enumerate(shape)]
        index = torch.randint(NOBODY, 2 + batch % 3, sizes, generator=generator)
        found.append(Labels(2 + batch % 3, index))
    ones = [0 if n == 0 else 1 for n in shape]
    return [*found, Labels(3, torch.full(ones, 1)), Labels(2, torch.full(ones, NOBODY))]


def with_samples(shape: Shape, batch: int) -> Layout:
    """Some place for this many samples in any shape: the first that fits, or labels all over."""
    for layout in places(shape):
        if layout.batch == batch:
            return layout
    generator = torch.Generator().manual_seed(batch)
    return Labels(batch, torch.randint(NOBODY, batch, shape, generator=generator))


@lru_cache(maxsize=65536)
def marks(layout: Layout, shape: Shape) -> torch.Tensor:
    """(B, *shape): which elements are whose."""
    samples = torch.arange(layout.batch).reshape(-1, *[1] * len(shape))
    return explicit(layout, shape) == samples
