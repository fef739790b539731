"""Grouping and summing by sample, against a loop over samples."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from persample.graph.layout import Labels, Layout, Shape, sample_dims
from persample.graph.sample_rows import SampleRows, sum_per_sample
from tests.graph.explicit import explicit, layouts, repeatable, varying


def numbers(*shape: int) -> Tensor:
    """Different numbers everywhere."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@st.composite
def rows(draw: st.DrawFn) -> tuple[SampleRows, Tensor, int]:
    """SampleRows over the leading dims of some tensor, the sample of each of its rows, and B."""
    layout, shape = draw(layouts())
    needed = max(sample_dims(layout, shape), default=-1) + 1
    row_dims = draw(st.integers(needed, len(shape)))
    found = SampleRows.of(layout, shape, row_dims)
    assert found is not None
    label = explicit(layout, shape)
    count = prod(shape[:row_dims])
    if label.numel():
        return found, label.reshape(count, -1)[:, 0], layout.batch
    sizes = [n if d < row_dims else 1 for d, n in enumerate(shape)]
    known = explicit(layout, tuple(sizes)) if isinstance(layout, Labels) else torch.zeros(sizes, dtype=torch.int64)
    return found, known.reshape(count), layout.batch


def grouped(t: Tensor, label: Tensor, batch: int) -> Tensor:
    """Each sample's rows in order, then zeros."""
    parts = [t[label == i] for i in range(batch)]
    longest = max(len(part) for part in parts)
    result = t.new_zeros(batch, longest, *t.shape[1:])
    for i, part in enumerate(parts):
        result[i, : len(part)] = part
    return result


@repeatable
@given(rows(), st.lists(st.integers(0, 3), max_size=2))
def test_group(drawn: tuple[SampleRows, Tensor, int], rest: list[int]) -> None:
    samples, label, batch = drawn
    t = numbers(len(label), *rest)
    assert torch.equal(samples.group(t), grouped(t, label, batch))
    again = numbers(len(label), 2)
    assert torch.equal(samples.group(again), grouped(again, label, batch))


@repeatable
@given(rows(), st.lists(st.integers(0, 3), max_size=2))
def test_sum(drawn: tuple[SampleRows, Tensor, int], rest: list[int]) -> None:
    samples, label, batch = drawn
    t = numbers(len(label), *rest)
    want = torch.stack([t[label == i].sum(0) for i in range(batch)])
    torch.testing.assert_close(samples.sum(t), want)


@repeatable
@given(layouts(), st.data())
def test_rows_need_the_sample_in_them(drawn: tuple[Layout, Shape], data: st.DataObject) -> None:
    layout, shape = drawn
    row_dims = data.draw(st.integers(0, len(shape)))
    if any(d >= row_dims for d in varying(explicit(layout, shape))):
        assert SampleRows.of(layout, shape, row_dims) is None


@st.composite
def broadcasts(draw: st.DrawFn) -> tuple[Layout, Shape, Shape]:
    """A layout, a shape, and the shape of an operand that was broadcast to it."""
    layout, shape = draw(layouts())
    kept = shape[draw(st.integers(0, len(shape))) :]
    return layout, shape, tuple(n if draw(st.booleans()) else 1 for n in kept)


@repeatable
@given(broadcasts())
def test_sum_per_sample(drawn: tuple[Layout, Shape, Shape]) -> None:
    layout, shape, target = drawn
    t, label = numbers(*shape), explicit(layout, shape)
    want = [t.masked_fill(label != i, 0).sum_to_size(target) for i in range(layout.batch)]
    torch.testing.assert_close(sum_per_sample(t, layout, target), torch.stack(want))


@repeatable
@given(broadcasts(), st.integers(0, 4))
def test_one_sample_does_not_spoil_the_others(drawn: tuple[Layout, Shape, Shape], bad: int) -> None:
    layout, shape, target = drawn
    label = explicit(layout, shape)
    t = numbers(*shape).masked_fill(label == bad, float("nan"))
    clean = torch.nan_to_num(t)
    others = [i for i in range(layout.batch) if i != bad]
    got, want = sum_per_sample(t, layout, target), sum_per_sample(clean, layout, target)
    torch.testing.assert_close(got[others], want[others])


@repeatable
@given(layouts(), st.data())
def test_strides_do_not_matter(drawn: tuple[Layout, Shape], data: st.DataObject) -> None:
    layout, shape = drawn
    order = data.draw(st.permutations(range(len(shape))))
    t = numbers(*[shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    target = shape[1:]
    torch.testing.assert_close(sum_per_sample(t, layout, target), sum_per_sample(t.contiguous(), layout, target))


def test_ragged_samples_are_padded() -> None:
    samples = SampleRows.of(Labels(4, torch.tensor([2, 0, 2, -1, 2]).reshape(5, 1)), (5, 3), 1)
    assert samples is not None
    assert samples.order().tolist() == [[1, -1, -1], [-1, -1, -1], [0, 2, 4], [-1, -1, -1]]
