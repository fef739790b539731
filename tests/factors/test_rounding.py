"""Numbers that are hard on factors: terms that cancel, huge and tiny ones, NaN, half precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persample.factors import (
    Apart,
    ByRows,
    Convolution,
    Deferred,
    Dense,
    Factor,
    Hadamard,
    Masked,
    Outer,
    Rows,
    Sum,
    View,
    Workspace,
)
from persample.factors.bounded import bounded_sum
from persample.factors.rearrange import Cast
from persample.kernels.gram import gram_norms
from tests.factors import (
    CONVOLUTIONS,
    FACTORS,
    GRAM_CONVOLUTIONS,
    SHAPE,
    TABLE,
    Made,
    numbers,
    outer_of,
    rows_of,
)
from tests.factors.test_algebra import CHECKED, assert_near, check, flat, precision
from tests.kernels.conv_cases import case

REAL = [torch.float32, torch.float64]


def cancelling(kind: str, big: float, dtype: torch.dtype) -> Made:
    """Terms of size ``big`` that cancel but for about 1."""
    twice = {"outer": (4, (30, 20)), "outer-written-out": (40, SHAPE), "groups": (4, (30, 20)), "tied": (2, TABLE)}
    if kind.startswith("convolution"):
        c = GRAM_CONVOLUTIONS["plain"] if kind.endswith("gram") else CONVOLUTIONS["2d-pad"]
        x, dy = c.tensors(4, 1, dtype)
        x, dy = torch.cat([x * big, numbers(dtype, *x.shape) - x * big], 1), torch.cat([dy, dy], 1)
        return Convolution(x, dy, c.weight_size, c.geometry), c.reference(x, dy)
    if kind == "outer-blocks":  # in the second of two blocks of a Gram matrix
        left, right = (numbers(dtype, 4, 278, n) * 0.01 for n in (600, 560))
        left[:, 256:] *= big
        left = torch.cat([left, 0.01 * numbers(dtype, 4, 22, 600) - left[:, 256:]], 1)
        return outer_of(left, torch.cat([right, right[:, 256:]], 1))
    if kind == "rows":
        ids, dy = torch.tensor([[3, 5, 3], [1, 1, 1]]).repeat(2, 2), numbers(dtype, 4, 3, TABLE[1])
        return rows_of(ids, torch.cat([dy * big, numbers(dtype, 4, 3, 1) - dy * big], 1), TABLE[0])
    if kind == "tied-against":  # the table's two uses against each other
        ids, dy = torch.full((4, 8), 3), numbers(dtype, 4, 8, TABLE[1]) * big
        left = torch.zeros(4, 1, TABLE[0], dtype=dtype).index_fill(2, torch.tensor(3), 1)
        reads, product = rows_of(ids, dy, TABLE[0]), outer_of(left, (numbers(dtype, 4, 1, TABLE[1]) - dy.sum(1, True)))
        return Sum([product[0], reads[0]]), product[1] + reads[1]
    T, (p, d) = twice[kind]
    groups = (2,) if kind == "groups" else ()
    left, right = numbers(dtype, 4, *groups, T // 2, p), numbers(dtype, 4, *groups, T // 2, d)
    left = torch.cat([left * big, 0.1 * numbers(dtype, 4, *groups, 1, p) - left * big], -2)
    made = outer_of(left, torch.cat([right, right], -2))
    if kind != "tied":
        return made
    others = cancelling("rows", big, dtype)
    return Sum([made[0], others[0]]), made[1] + others[1]


CANCELLING = "outer outer-blocks outer-written-out groups rows tied tied-against convolution convolution-gram".split()


@pytest.mark.parametrize("big", [1.0, 10.0, 1e2, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("kind", CANCELLING)
def test_norms_of_terms_that_cancel(kind: str, big: float) -> None:
    """No worse than gradients that are written out: the rounding of the terms, not of their squares."""
    factor, want = cancelling(kind, big, torch.float32)
    norms, sizes = flat(want).norm(dim=1), factor.term_norms()
    allowed = torch.maximum(1e-6 * norms, 16 * torch.finfo(torch.float32).eps * sizes)
    assert bool(((factor.norms() - norms).abs() <= allowed).all())


@pytest.mark.parametrize("big", [1.0, 10.0, 1e2, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("kind", CANCELLING)
def test_sums_of_terms_that_cancel(kind: str, big: float) -> None:
    """No sample adds more than its norm, whatever it is taken to be, to a clipped sum."""
    factor, _ = cancelling(kind, big, torch.float32)
    for i in range(4):
        weights = torch.zeros(4).index_fill(0, torch.tensor(i), 1) / factor.norms()
        assert float(bounded_sum(factor, weights).norm()) <= 1 + 1e-3


@pytest.mark.parametrize("big", [1.0, 1e2, 1e4, 1e6])
def test_inner_products_of_rows_whose_terms_cancel(big: float) -> None:
    """The rounding of the rows' sums, not of the products of their terms."""
    factor, want = cancelling("rows", big, torch.float32)
    sizes = 16 * torch.finfo(torch.float32).eps * factor.term_norms()
    norms = flat(want).norm(dim=1) + sizes
    allowed = 1e-6 * torch.outer(norms, norms) + torch.outer(norms, sizes) + torch.outer(sizes, norms)
    error = (factor.gram(factor) - flat(want) @ flat(want).t()).abs()
    assert bool((error <= allowed).all())


@settings(CHECKED, max_examples=60)
@given(
    st.integers(0, 2**20),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 8),
    st.floats(-9, 1),
    st.booleans(),
)
def test_gram_norms_of_any_cancellation(seed: int, dtype: torch.dtype, T: int, digits: float, coherent: bool) -> None:
    """Also where all terms are nearly parallel; against extended precision."""
    rng = torch.Generator().manual_seed(seed)
    left, right = (torch.rand(3, T, n, generator=rng, dtype=dtype) - (0 if coherent else 0.5) for n in (50, 40))
    left = torch.cat([left, -left + 10**digits * torch.rand(3, T, 50, generator=rng, dtype=dtype)], 1)
    right = torch.cat([right, right], 1)
    factor = Outer(left, right)
    assert not factor.prefers_stack(reused=False)
    long = np.einsum("btp,btd->bpd", *(t.numpy().astype(np.longdouble) for t in (left, right)))
    norms = torch.from_numpy(np.sqrt((long**2).sum((1, 2))).astype(np.float64))
    sizes = (left.double().norm(dim=2) * right.double().norm(dim=2)).sum(1)
    allowed = torch.maximum(1e-6 * norms, 16 * torch.finfo(dtype).eps * sizes)
    assert bool(((factor.norms() - norms).abs() <= allowed).all())


SCALES = [(i, j) for i in range(-34, 37, 4) for j in range(-36, 37, 3) if -28 <= i + j <= 28]
SCALED = [
    *"outer-T1 outer-gram outer-T40 outer-groups-T1 outer-groups-gram sum-tied".split(),
    *"convolution-gram-plain-R1 convolution-2d-pad-R1".split(),
]


def rescaled(factor: Any, left: float, right: float) -> Factor:
    """The factor with both sides multiplied."""
    if isinstance(factor, Outer):
        return Outer((factor.left.double() * left).float(), (factor.right.double() * right).float(), factor.scale)
    if isinstance(factor, Convolution):
        x, dy = (factor.x.double() * left).float(), (factor.dy.double() * right).float()
        return Convolution(x, dy, factor.size, factor.geometry)
    if isinstance(factor, Rows):
        return Rows(factor.ids, (factor.dy.double() * (left * right)).float(), factor.size)
    return Sum([rescaled(term, left, right) for term in factor.terms])


@pytest.mark.parametrize("name", SCALED)
def test_huge_and_tiny_values(name: str) -> None:
    """In float32, inputs and cotangents of very different scales give gradients that are well in range."""
    made, want = FACTORS[name](2, torch.float32)
    ones, wrong = torch.ones(2, *made.shape), []
    for i, j in SCALES:
        factor, scale = rescaled(made, 10.0**i, 10.0**j), 10.0 ** (i + j)
        n = flat(want) * scale
        norms = n.norm(dim=1)
        found = {
            "norms": (factor.norms(), norms, norms),
            "dot": (factor.dot(ones), n @ flat(ones).t(), norms.unsqueeze(1) * flat(ones)[0].norm()),
            "sum": (bounded_sum(factor, 1 / norms), (n / norms.unsqueeze(1)).sum(0).view(made.shape), 1.0),
            "gram": (factor.gram(factor), n @ n.t(), norms.max() ** 2),
            "squares": (factor.sum_squares(), n.square().sum(0).view(made.shape), norms.max() ** 2),
        }
        if abs(i + j) > 14:  # squares of gradients are out of range
            del found["gram"], found["squares"]
        for what, (got, meant, size) in found.items():
            if not bool(((got.double() - meant).abs() <= 1e-5 * size).all()):
                wrong.append(f"{what} at 1e{i} times 1e{j}")
    assert not wrong, f"{len(wrong)}: {wrong[:5]}"


def spoil(factor: Any, sample: int, value: float) -> None:
    """Overwrite what one sample's gradients are made from."""
    if isinstance(factor, Masked):
        factor.value.masked_fill_(factor.index == sample, value)
    elif isinstance(factor, Deferred):
        spoil(factor._make.__self__, sample, value)
    elif isinstance(factor, (View, Hadamard)):
        spoil(factor.base, sample, value)
    elif isinstance(factor, Sum):
        spoil(factor.terms[-1], sample, value)
    elif isinstance(factor, Apart):
        for index, group in factor.groups:
            if sample in index:
                spoil(group, index.tolist().index(sample), value)
    else:
        side = {Outer: "left", Convolution: "dy", Rows: "dy", Dense: "value", ByRows: "scales"}[type(factor)]
        setattr(factor, side, getattr(factor, side).index_fill(0, torch.tensor(sample), value))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [name for name in FACTORS if name != "outer-gram-blocks"])
def test_one_sample_that_is_not_finite(name: str, value: float) -> None:
    """The others' norms and products are as before, and its own norm says so."""
    factor, want = FACTORS[name](3, torch.float64)
    spoil(factor, 1, value)
    others, rtol = torch.tensor([0, 2]), precision(factor)
    if not bool(factor.stack()[1].isfinite().all()):
        assert not bool(factor.norms()[1].isfinite())
        check(factor[others], want[others], rtol=rtol)
    n, ones = flat(want), torch.ones(3, *factor.shape, dtype=factor.dtype)
    assert_near(factor.norms()[others], n.norm(dim=1)[others], 1 + n.norm(), rtol)
    assert_near(factor.gram(factor)[others][:, others], (n @ n.t())[others][:, others], 1 + n.norm() ** 2, rtol)
    for k in (1, 3):
        assert_near(factor.dot(ones[:k])[others], (n @ flat(ones[:k]).t())[others], 1 + n.norm() * 99, rtol)


@pytest.mark.parametrize("name", [n for n in FACTORS if "cast" not in n and "complex" not in n and "blocks" not in n])
def test_bfloat16_is_rounded_once_or_twice(name: str) -> None:
    """Every question in float32, from gradients that are rounded to bfloat16 or not at all."""
    factor, want = FACTORS[name](3, torch.bfloat16)
    check(factor, want, rtol=2 * torch.finfo(torch.bfloat16).eps)
    assert factor.weighted_sum(torch.ones(3)).dtype == factor.dot(torch.ones(1, *factor.shape)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_do_not_stall_in_half_precision(dtype: torch.dtype) -> None:
    """256 + 1 is 256 in bfloat16 and 2048 + 1 is 2048 in float16: 3000 ones are 3000 only if added up in float32."""
    n, ones = 3000, torch.ones(3000, dtype=dtype)
    samples = {
        "dense": Dense(ones.view(n, 1)),
        "outer": Outer(ones.view(n, 1, 1), ones.view(n, 1, 1)),
        "rows": Rows(torch.zeros(n, 1, dtype=torch.long), ones.view(n, 1, 1), 1),
    }
    for factor in samples.values():
        assert float(factor.weighted_sum(torch.ones(n))) == float(factor.sum_squares()) == n
    positions = {
        "outer": Outer(ones.view(1, n, 1), ones.view(1, n, 1)),
        "rows": Rows(torch.zeros(1, n, dtype=torch.long), ones.view(1, n, 1), 1),
        "convolution": Convolution(
            ones.view(1, n, 1, 1), ones.view(1, n, 1, 1), (1, 1, 1), case((1,), (1,), d=1, p=1).geometry
        ),
    }
    for name, factor in positions.items():
        for what, got in {
            "norm": factor.norms(),
            "sum": factor.weighted_sum(torch.ones(1)),
            "dot": factor.dot(torch.ones(1, *factor.shape)),
            "gram": factor.gram(factor).sqrt(),
            "squares": factor.sum_squares().sqrt(),
        }.items():
            assert float(got) == pytest.approx(n, rel=torch.finfo(dtype).eps), f"{what} of {name}"


def test_overflow_of_a_cast_is_seen() -> None:
    """A norm must not be finite where the gradients are not."""
    for factor in (
        Dense(torch.tensor([[1e6, 1.0], [3.0, 4.0]])),
        Outer(torch.ones(2, 1, 1), torch.tensor([[[1e6]], [[5.0]]])),
    ):
        moved = View(factor, factor.shape, Cast(torch.float32, torch.float16))
        assert moved.norms().tolist() == [float("inf"), 5.0]


def test_factors_that_share_a_side() -> None:
    """What one has remembered of the shared side serves the other, whole or in part."""
    left, shared = numbers(torch.float64, 4, 5, 30), {}
    made = [outer_of(left, numbers(torch.float64, 4, 5, n)) for n in (20, 25, 25)]
    factors = [Outer(f.left, f.right, scale, memo=shared) for (f, _), scale in zip(made, (1.0, -2.0, 1.0), strict=True)]
    wants = [flat(want).norm(dim=1) * abs(f.scale) for f, (_, want) in zip(factors, made, strict=True)]
    assert_near(factors[0].norms(), wants[0], 100)
    assert_near(factors[1].norms(), wants[1], 100)
    assert_near(factors[2].norms(Workspace(1)), wants[2], 100)
    assert_near(factors[1][torch.tensor([2, 0])].norms(), wants[1][[2, 0]], 100)
    assert_near(Outer(left, made[1][0].right, memo=shared).norms(), wants[1] / 2, 100)


def test_squares_around_the_mean_of_nearly_equal_samples() -> None:
    """What is left of the squares is far below their rounding."""
    left, right = 1 + 1e-9 * numbers(torch.float64, 8, 1, 6), numbers(torch.float64, 1, 1, 4).expand(8, 1, 4)
    for factor in (Outer(left, right), Outer(left.unsqueeze(1), right.unsqueeze(1)), Dense(outer_of(left, right)[1])):
        stack = factor.stack()
        want = (stack - stack.mean(0)).square().sum(0)
        got = factor.sum_squares(stack.mean(0))
        assert bool(((got - want).abs() <= 1e-3 * want).all())


@pytest.mark.parametrize("T", [1, 255, 256, 257, 600])
def test_gram_norms_hold_for_ordinary_numbers_at_any_length(T: int) -> None:
    """Longer than one block of rows, too: norms that fell back to stacks would be right, and slow."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(2, T, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    norms, holds = gram_norms(left, right, torch.float64)
    assert bool(holds.all())
    torch.testing.assert_close(norms, torch.einsum("btp,btd->bpd", left, right).flatten(1).norm(dim=1))
