"""Exact sums of data that are chosen to break them."""

from __future__ import annotations

import math

import pytest
import torch

from persample.factors import Dense, Factor, Outer, Rows, Sum, View, Workspace
from persample.factors.limits import Unit
from persample.factors.rearrange import AsComplex
from persample.kernels.norms import row_norms


def largest_share(factor: Factor, bound: float) -> float:
    """Of one sample with the largest weight that is allowed, in bounds."""
    unit = Unit.below(bound, 10)
    exact = factor.integer_sum(unit, Workspace())
    weights = torch.minimum(exact.limits.largest_weights(bound), (bound / factor.norms()).clamp(max=1))
    return math.sqrt(sum(int(n) ** 2 for n in exact.totals(weights)[0].flatten())) * unit.size / bound


@pytest.mark.parametrize(
    ("positions", "features", "value"),
    [(16, 32, 4.2e-5), (40, 512, 2.75e-5)],
    ids=["norms of a stack that underflows", "a stack whose elements are rounded up"],
)
def test_numbers_below_those_of_float16(positions: int, features: int, value: float) -> None:
    side = torch.full((1, positions, features), value, dtype=torch.float16)
    factor = Outer(side, side)
    true = float((side.double().mT @ side.double()).norm())
    assert float(factor.norm_bounds(Workspace())) >= true
    assert largest_share(factor, max(float(factor.norms()), 1e-7)) <= 1


@pytest.mark.parametrize(("size", "batch"), [(3, 60_000), (64, 5000), (512, 600)])
def test_norms_do_not_depend_on_other_rows(size: int, batch: int) -> None:
    """Not in one digit: the errors of many equal samples add up, and counts of samples below a bound jump."""
    for seed in range(5):
        row = torch.randn(1, size, generator=torch.Generator().manual_seed(seed))
        rows = row.expand(batch, size).contiguous()
        alone = row_norms(row)
        assert torch.equal(row_norms(rows)[0], alone[0])
        assert torch.equal(row_norms(torch.cat([rows, torch.zeros(1, size)]))[0], alone[0])


def test_a_sum_of_complex_views_is_complex() -> None:
    pairs = [torch.randn(3, 4, 2) for _ in range(2)]
    total = Sum([View(Dense(t), (4,), AsComplex(torch.complex64)) for t in pairs])
    assert total.dtype == torch.complex64
    torch.testing.assert_close(torch.view_as_real(total.stack()), pairs[0] + pairs[1])


def test_terms_that_are_larger_than_their_sum_are_added_up_exactly() -> None:
    """Of every term alone, the total over all samples is far larger than the bound allows for their sum."""
    torch.manual_seed(0)
    batch, positions, bound = 2047, 8, 0.999
    rows = torch.rand(batch, positions, 1) + 0.5
    left, right = torch.zeros(batch, 1, 2), -rows.double().sum((1, 2)) * (1 - 1 / 200)
    left[..., 0] = 1
    factor = Sum(
        [Rows(torch.zeros(batch, positions, dtype=torch.long), rows, 2), Outer(left, right.float().view(-1, 1, 1))]
    )
    unit = Unit.below(bound, batch)
    exact = factor.integer_sum(unit, Workspace())
    weights = torch.minimum(bound / factor.norms(), exact.limits.largest_weights(bound))
    apart = [factor[b : b + 1].integer_sum(unit, Workspace()).totals(weights[b : b + 1])[0, 0] for b in range(batch)]
    assert int(exact.totals(weights)[0, 0, 0]) == sum(int(t) for t in apart)
