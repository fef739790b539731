"""Exact sums where numbers cannot be looked at: the same guarantees, and one question for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from persample.factors import Dense, Factor, Outer, Rows, Sum, Workspace
from persample.factors.limits import WHOLE, Unit
from persample.kernels.devices import looking
from persample.reductions import Call, ClippedSum
from persample.reductions.exact import ExactClippedSum, ExactSums
from tests.dp import test_sensitivity as attacks
from tests.factors import test_exact as guarantees
from tests.factors.test_exact import DTYPES, KINDS, B, capped, made

FORMS = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name in KINDS
    for dtype in DTYPES
    if name != "gram"  # which insists on what the CPU would choose
]


@pytest.fixture(autouse=True)
def _not_looking() -> Iterator[None]:
    with looking(False):
        yield


@pytest.mark.parametrize(("name", "dtype"), FORMS)
def test_guarantees(name: str, dtype: torch.dtype) -> None:
    guarantees.test_no_sample_adds_more_than_the_bound(name, dtype, 0.7)
    guarantees.test_shares_add_up_in_any_order(name, dtype)
    guarantees.test_shares_are_the_weighted_gradients(name, dtype)
    guarantees.test_bounds_hold(name, dtype)


@pytest.mark.parametrize("samples", [10, 10**5], ids=["float64", "int64"])
def test_attacks(samples: int) -> None:
    attacks.test_an_input_of_zeros(samples)
    attacks.test_a_loss_of_zero_through_a_convolution(samples)


def test_nobody_is_changed_by_others() -> None:
    attacks.test_a_dropped_sample_changes_nobody_else()
    attacks.test_a_gradient_of_zero_changes_nobody_else(64, 999)
    attacks.test_counts_of_samples_at_the_bound()
    attacks.test_a_batch_of_one_is_like_others()
    attacks.test_rounding_does_not_depend_on_others_scales()
    attacks.test_written_gradients_do_not_depend_on_where_they_lie()


@pytest.mark.parametrize("name", ["outer", "positions", "convolution", "rows", "several", "moved"])
@pytest.mark.parametrize("parts", [1, 3])
def test_at_once_or_not(name: str, parts: int) -> None:
    """The answer to the question changes nothing, where both are right."""
    factor, unit = made(name, torch.float32), Unit.below(1.0, 1000)
    weights = capped(factor, 1.0, unit)
    exact = factor.integer_sum(unit, Workspace())
    assert all(bool((sizes(weights, parts) < 2.0**WHOLE).all()) for sizes in exact.term_sizes)
    assert torch.equal(exact.totals(weights, parts, at_once=True), exact.totals(weights, parts))


def test_other_weights_for_the_same_sum() -> None:
    factor, unit = made("positions", torch.float32), Unit.below(1.0, 1000)
    weights, exact = capped(factor, 1.0, unit), factor.integer_sum(unit, Workspace())
    for given in (weights, weights / 3):
        assert torch.equal(exact.totals(given), factor.integer_sum(unit, Workspace()).totals(given))


def reduced(factor: Factor, bound: float, samples: int, *, at_once: bool = True) -> tuple[ExactSums, Tensor]:
    clip = ExactClippedSum(ClippedSum(bound, nonfinite="drop"), samples)
    p = torch.zeros(factor.shape, dtype=factor.dtype)
    clip.start(Call({"p": p}, factor.batch, p.device, dict))
    clip.add("p", factor)
    sums = clip.result()
    assert [each.at_once for each in sums.joint] == [at_once]
    total = sums.take("p")
    assert total is not None
    return sums, total


def cancelling(batch: int) -> Factor:
    """Two positions that are hundreds of times larger than their sum."""
    left, right = torch.rand(batch, 2, 1) + 0.5, torch.rand(batch, 1, 1).expand(batch, 2, 1) + 0.5
    left[:, 1] = -left[:, 0] * (1 - 1 / 300)
    return Outer(left, right.contiguous())


def test_products_too_large_to_be_added_up_at_once() -> None:
    torch.manual_seed(0)
    batch, bound = 2047, 0.999
    factor, unit = cancelling(batch), Unit.below(bound, batch)
    factor.right.mul_(torch.logspace(1, 6, batch).view(-1, 1, 1))
    _, total = reduced(factor, bound, batch, at_once=False)
    weights = capped(factor, bound, unit)
    exact = factor.integer_sum(unit, Workspace())
    assert float(exact.term_sizes[0](weights, 1)) > 2.0**WHOLE
    apart = [factor[b : b + 1].integer_sum(unit, Workspace()).totals(weights[b : b + 1])[0] for b in range(batch)]
    assert int(total) == sum(int(t) for t in apart)
    assert abs(int(total)) * unit.size <= batch * bound


HARD = {
    "tiny": torch.tensor([1e-38, 1e-30, 1e-42, 1.0]),
    "huge": torch.tensor([1e18, 1e12, 1e-12, 1.0]),
    "all zero": torch.zeros(4),
}


@pytest.mark.parametrize("sizes", HARD.values(), ids=HARD)
@pytest.mark.parametrize("bound", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("form", ["dense", "outer", "rows", "sum"])
def test_each_sample_is_rounded_alone(form: str, sizes: Tensor, bound: float) -> None:
    """With neighbours of any size, or none: denormals, scales beyond float32, terms that cancel."""
    torch.manual_seed(0)
    rows = torch.randn(4, 3, 5) * sizes.view(-1, 1, 1)
    ids = torch.tensor([[0, 1, 0]]).expand(4, 3).contiguous()
    factors: dict[str, Factor] = {
        "dense": Dense(rows[:, 0]),
        "outer": Outer(rows, torch.randn(4, 3, 2)),
        "rows": Rows(ids, rows, 3),
        "sum": Sum([Outer(torch.randn(4, 3, 3), rows), Rows(ids, rows, 3)]),
    }
    factor = factors[form]
    _, total = reduced(factor, bound, 100)
    alone = [reduced(factor[b : b + 1], bound, 100)[1] for b in range(4)]
    assert torch.equal(total, torch.stack(alone).sum(0))
    unit = Unit.below(bound, 100)
    for each in alone:
        assert sum(int(n) ** 2 for n in each.flatten()) * unit.size**2 <= bound**2


def test_a_sample_that_is_dropped_leaves_the_others_as_they_are() -> None:
    torch.manual_seed(0)
    for spoilt in (float("nan"), float("inf")):
        left, right = torch.randn(B, 3, 4), torch.randn(B, 3, 5)
        others = torch.tensor([b for b in range(B) if b != 2])
        _, want = reduced(Outer(left[others], right[others]), 0.5, 100)
        left[2, 1, 0] = spoilt
        sums, found = reduced(Outer(left, right), 0.5, 100)
        assert list(sums.clipping.dropped) == [2]
        assert torch.equal(found, want)
        assert float(sums.clipping.weights[2]) == 0
