"""Layouts drawn at random, and the brute force they are compared with: one label for every element."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from persample.graph.layout import Block, Labels, Layout, Shape

# The same examples in every run; what was found once is not remembered, but written down as an example.
repeatable = settings(derandomize=True, deadline=None, database=None, print_blob=False, max_examples=100)


def explicit(layout: Layout, shape: Shape) -> Tensor:
    """The sample of every element, by definition."""
    if isinstance(layout, Labels):
        return layout.index.expand(shape)
    return (torch.arange(prod(shape)) // layout.inner % layout.batch).reshape(shape)


def varying(label: Tensor) -> tuple[int, ...]:
    """The dims along which labels change."""
    return tuple(d for d, n in enumerate(label.shape) if n > 1 and bool((label != label.narrow(d, 0, 1)).any()))


@st.composite
def integers(draw: st.DrawFn, low: int, high: int, shape: Sequence[int]) -> Tensor:
    """Integers below `high`, from one drawn seed."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    return torch.randint(low, high, tuple(shape), generator=generator)


@st.composite
def factorisations(draw: st.DrawFn, count: int, most: int = 4) -> Shape:
    """A shape of `count` elements, with dims of size one here and there."""
    shape = []
    while count > 1 and len(shape) < most - 1:
        n = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
        shape.append(n)
        count //= n
    return (*shape, count) if count != 1 or draw(st.booleans()) else tuple(shape)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Block, Shape]:
    """(outer · B · inner) elements under any shape at all."""
    batch, inner, outer = draw(st.integers(2, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return Block(batch, inner), draw(factorisations(outer * batch * inner))


@st.composite
def folded_blocks(draw: st.DrawFn) -> tuple[Block, Shape]:
    """A dim of size a · B · b among others: what networks are made of."""
    batch, a, b = draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    before = draw(st.lists(st.integers(1, 5), max_size=2))
    after = draw(st.lists(st.integers(1, 5), max_size=2))
    return Block(batch, b * prod(after)), (*before, a * batch * b, *after)


@st.composite
def explicit_labels(draw: st.DrawFn) -> tuple[Labels, Shape]:
    """Any order, repeats, missing samples, elements that are nobody's, empty dims."""
    batch = draw(st.integers(2, 5))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    sizes = [n if draw(st.booleans()) else 1 for n in shape]
    return Labels(batch, draw(integers(-1, batch, sizes))), shape


def layouts() -> st.SearchStrategy[tuple[Layout, Shape]]:
    """A layout and the shape of a tensor that may have it."""
    return st.one_of(folded_blocks(), blocks(), explicit_labels())
