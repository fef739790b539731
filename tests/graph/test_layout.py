"""The algebra of layouts, against labels written out for every element."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from persample.graph.layout import (
    NOBODY,
    Block,
    Labels,
    Layout,
    Shape,
    carry,
    join,
    labels,
    reshape,
    sample_dims,
    simplify,
    split,
    strides,
)
from tests.graph.explicit import (
    blocks,
    explicit,
    explicit_labels,
    factorisations,
    folded_blocks,
    integers,
    layouts,
    repeatable,
    varying,
)


def same(found: Layout, shape: Shape, want: Tensor) -> bool:
    """Does a layout mean these labels, and does it broadcast to the shape?"""
    assert labels(found, shape).ndim == len(shape)
    return torch.equal(labels(found, shape).expand(shape), want) and torch.equal(explicit(found, shape), want)


def test_strides_of_empty_dims_count_one_element() -> None:
    assert strides(()) == ()
    assert strides((2, 3, 4)) == (12, 4, 1)
    assert strides((2, 0, 4)) == (4, 4, 1)


@repeatable
@given(layouts())
def test_labels_name_the_sample_of_every_element(drawn: tuple[Layout, Shape]) -> None:
    layout, shape = drawn
    assert same(layout, shape, explicit(layout, shape))


@repeatable
@given(st.one_of(blocks(), folded_blocks()))
def test_sample_dims_of_a_block_are_those_along_which_labels_change(drawn: tuple[Block, Shape]) -> None:
    block, shape = drawn
    assert sample_dims(block, shape) == varying(explicit(block, shape))


@repeatable
@given(explicit_labels())
def test_sample_dims_of_labels_miss_none(drawn: tuple[Labels, Shape]) -> None:
    layout, shape = drawn
    assert set(sample_dims(layout, shape)) >= set(varying(explicit(layout, shape)))


@repeatable
@given(layouts(), st.data())
def test_reshape_keeps_the_order_of_elements(drawn: tuple[Layout, Shape], data: st.DataObject) -> None:
    layout, shape = drawn
    to_shape = data.draw(factorisations(prod(shape)) if prod(shape) else st.just((*shape[::-1], 1)))
    want = explicit(layout, shape).reshape(to_shape)
    assert same(reshape(layout, shape, to_shape), to_shape, want)


@repeatable
@given(layouts(), st.data())
def test_views_one_after_another(drawn: tuple[Layout, Shape], data: st.DataObject) -> None:
    layout, shape = drawn
    label = explicit(layout, shape)
    for _ in range(3):
        if label.numel() and data.draw(st.booleans()):
            to_shape = data.draw(factorisations(label.numel()))
            layout, label = reshape(layout, tuple(label.shape), to_shape), label.reshape(to_shape)
        else:
            order = data.draw(st.permutations(range(label.ndim)))
            moved = label.permute(order)
            found = carry(layout, tuple(label.shape), tuple(moved.shape), [order.index(d) for d in range(label.ndim)])
            assert found is not None
            layout, label = found, moved
        assert same(layout, tuple(label.shape), label)


@repeatable
@given(layouts(), st.data())
def test_carry_permutes(drawn: tuple[Layout, Shape], data: st.DataObject) -> None:
    layout, shape = drawn
    order = data.draw(st.permutations(range(len(shape))))
    want = explicit(layout, shape).permute(order)
    found = carry(layout, shape, tuple(want.shape), [order.index(d) for d in range(len(shape))])
    assert found is not None
    assert same(found, tuple(want.shape), want)


@repeatable
@given(layouts(), st.data())
def test_carry_follows_what_is_kept(drawn: tuple[Layout, Shape], data: st.DataObject) -> None:
    """Dims dropped, resized, moved and new: exact where the sample's dims are kept, refused elsewhere."""
    layout, shape = drawn
    rank = len(shape)
    kept = [d for d in range(rank) if data.draw(st.integers(0, 3)) or d in sample_dims(layout, shape)]
    lost = data.draw(st.integers(0, 5))  # now and then a dim that may matter
    kept = [d for d in kept if d != lost]
    new = data.draw(st.integers(0, 2))
    places = data.draw(st.permutations(range(len(kept) + new)))[: len(kept)]
    to_dims: list[int | None] = [None] * rank
    to_shape = data.draw(st.lists(st.integers(1, 4), min_size=len(kept) + new, max_size=len(kept) + new))
    for d, to in zip(kept, places, strict=True):
        to_dims[d] = to
        if d in sample_dims(layout, shape) or data.draw(st.integers(0, 3)):
            to_shape[to] = shape[d]
    found = carry(layout, shape, tuple(to_shape), to_dims)
    changed = varying(explicit(layout, shape))
    if found is None:
        assert any(to_dims[d] is None for d in sample_dims(layout, shape))
        return
    assert all(to_dims[d] is not None for d in changed)
    label = explicit(layout, shape)
    if label.numel() == 0:
        assert labels(found, tuple(to_shape)).expand(to_shape).shape == tuple(to_shape)
        return
    for d in range(rank):
        if d not in changed:
            label = label.narrow(d, 0, 1)
    source = [next((d for d in range(rank) if to_dims[d] == e), None) for e in range(len(to_shape))]
    rest = [d for d in range(rank) if d not in source]
    label = (
        label.permute([d for d in source if d is not None] + rest).flatten(len(kept)).select(-1, 0)
        if rest
        else (label.permute([d for d in source if d is not None]))
    )
    sizes = iter(label.shape)
    want = label.reshape([1 if d is None else next(sizes) for d in source]).expand(to_shape)
    assert same(found, tuple(to_shape), want)


def test_carry_refuses_a_sample_dim_of_another_size() -> None:
    assert carry(Block(4, 1), (4,), (8,), [0]) is None
    assert carry(Labels(2, torch.tensor([1, 0, 0])), (3,), (1,), [0]) is None


@repeatable
@given(explicit_labels())
def test_simplify_keeps_labels_and_drops_dims(drawn: tuple[Labels, Shape]) -> None:
    layout, shape = drawn
    found = simplify(layout.index, shape, layout.batch)
    want = explicit(layout, shape)
    assert same(found, shape, want)
    if want.numel():
        assert sample_dims(found, shape) == varying(want)


@repeatable
@given(st.one_of(blocks(), folded_blocks()))
def test_simplify_recognises_blocks(drawn: tuple[Block, Shape]) -> None:
    block, shape = drawn
    want = explicit(block, shape)
    found = simplify(want, shape, block.batch)
    assert same(found, shape, want)
    folded = [d for d in varying(want) if split(block, shape, d)]
    assert isinstance(found, Block) or not folded


@repeatable
@given(layouts())
def test_split_is_the_middle_factor_of_one_dim(drawn: tuple[Layout, Shape]) -> None:
    layout, shape = drawn
    label = explicit(layout, shape)
    for dim, n in enumerate(shape):
        found = split(layout, shape, dim)
        if found is None:
            continue
        a, b = found
        assert a * layout.batch * b == n
        line = torch.arange(n) // b % layout.batch
        assert torch.equal(label, line.reshape([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape))


@repeatable
@given(folded_blocks())
def test_split_finds_every_fold(drawn: tuple[Block, Shape]) -> None:
    block, shape = drawn
    (dim,) = varying(explicit(block, shape))
    found = split(block, shape, dim)
    assert found is not None
    assert found[1] == block.inner // prod(shape[dim + 1 :])
    assert all(split(block, shape, d) is None for d in range(len(shape)) if d != dim)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout, Shape]:
    """Two layouts of one shape that often agree where both say something."""
    layout, shape = draw(layouts())
    label = explicit(layout, shape).clone()
    other = label.masked_fill(draw(integers(0, 2, shape)).bool(), NOBODY)
    if label.numel() and draw(st.booleans()):
        place = draw(st.integers(0, label.numel() - 1))
        other.view(-1)[place] = draw(st.integers(NOBODY, layout.batch - 1))
    return layout, simplify(other, shape, layout.batch), shape


@repeatable
@given(pairs(), st.booleans())
def test_join_takes_whoever_is_there(drawn: tuple[Layout, Layout, Shape], swap: bool) -> None:
    a, b, shape = drawn
    x, y = explicit(a, shape), explicit(b, shape)
    conflict = bool(((x != y) & (x != NOBODY) & (y != NOBODY)).any())
    found = join(b, a, shape) if swap else join(a, b, shape)
    if conflict:
        assert found is None
    else:
        assert found is not None
        assert same(found, shape, torch.maximum(x, y))


@repeatable
@given(st.data())
def test_join_of_two_blocks(data: st.DataObject) -> None:
    batch, count = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 12))
    shape = data.draw(factorisations(batch * count))
    inners = [n for n in range(1, count + 1) if count % n == 0]
    a, b = (Block(batch, data.draw(st.sampled_from(inners))) for _ in range(2))
    found = join(a, b, shape)
    agree = torch.equal(explicit(a, shape), explicit(b, shape))
    assert (found is not None) == agree
    if found is not None:
        assert same(found, shape, explicit(a, shape))


@pytest.mark.parametrize(
    ("shape", "block", "dims", "dim", "parts"),
    [
        ((4, 3), Block(4, 3), (0,), 0, (1, 1)),  # batch-first
        ((3, 4), Block(4, 1), (1,), 1, (1, 1)),  # batch-last
        ((4, 4), Block(4, 1), (1,), 1, (1, 1)),  # time-first, T == B
        ((12, 5), Block(4, 15), (0,), 0, (1, 3)),  # (B·T, C)
        ((12, 5), Block(4, 5), (0,), 0, (3, 1)),  # (T·B, C)
        ((24, 5), Block(4, 10), (0,), 0, (3, 2)),  # (a·B·b, C)
        ((2, 2, 3), Block(4, 3), (0, 1), 0, None),  # the batch over two dims
        ((2, 6), Block(4, 1), (0, 1), 1, None),  # a view across the batch: three samples and a half per row
    ],
)
def test_known_layouts(shape: Shape, block: Block, dims: Shape, dim: int, parts: tuple[int, int] | None) -> None:
    assert sample_dims(block, shape) == dims
    assert split(block, shape, dim) == parts


def test_two_adjacent_dims_merge_into_one() -> None:
    index = torch.tensor([[0, 1], [2, 3]]).reshape(2, 2, 1)
    assert simplify(index, (2, 2, 5), 4) == Block(4, 5)
    assert reshape(Labels(4, index), (2, 2, 5), (4, 5)) == Block(4, 5)


def test_repeated_and_missing_samples_stay_explicit() -> None:
    found = simplify(torch.tensor([0, 0, 2, 2, 1]).reshape(5, 1).expand(5, 3), (5, 3), 4)
    assert isinstance(found, Labels)
    assert found.index.shape == (5, 1)
    merged = reshape(found, (5, 3), (15,))
    assert labels(merged, (15,)).tolist() == [0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 1, 1, 1]


def test_an_empty_tensor_has_labels_that_broadcast() -> None:
    for shape, to_shape in [((0,), (0, 3)), ((2, 0), (0,)), ((0, 3), (3, 0)), ((1, 0), (0, 1, 1))]:
        found = reshape(Labels(2, torch.zeros([0 if n == 0 else 1 for n in shape], dtype=torch.int64)), shape, to_shape)
        assert labels(found, to_shape).expand(to_shape).shape == to_shape
