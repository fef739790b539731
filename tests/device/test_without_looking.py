"""What holds for factors and reductions holds where numbers cannot be looked at, too: the same tests, blindfolded.

The CPU then computes as an accelerator does. Left out are tests of what is chosen on a CPU, and of what is only called
where there is something to look at.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import persample as ps
from persample.factors import Factor
from persample.kernels.devices import looking
from persample.reductions.base import Call
from tests.factors import test_rounding
from tests.factors.test_algebra import (  # noqa: F401
    test_every_question,
    test_inner_products_with_every_other_kind,
    test_some_of_the_samples,
)
from tests.factors.test_part import test_norms_and_sums_of_a_group, test_what_is_not_finite_stays_in_its_sample  # noqa: F401
from tests.factors.test_rounding import (  # noqa: F401
    test_bfloat16_is_rounded_once_or_twice,
    test_factors_that_share_a_side,
    test_huge_and_tiny_values,
    test_inner_products_of_rows_whose_terms_cancel,
    test_norms_of_terms_that_cancel,
    test_one_sample_that_is_not_finite,
    test_overflow_of_a_cast_is_seen,
    test_squares_around_the_mean_of_nearly_equal_samples,
    test_sums_do_not_stall_in_half_precision,
)
from tests.kernels.test_norms import *  # noqa: F403
from tests.reductions.test_clipping import *  # noqa: F403
from tests.reductions.test_edges import *  # noqa: F403
from tests.reductions.test_groups import *  # noqa: F403
from tests.reductions.test_memory import test_max_memory_bounds_what_is_written_out  # noqa: F401
from tests.reductions.test_mixes import *  # noqa: F403


@pytest.fixture(autouse=True)
def _blindfolded() -> Iterator[None]:
    with looking(False):
        yield


@pytest.mark.parametrize("big", [1.0, 10.0, 1e2, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("kind", test_rounding.CANCELLING)
def test_clipped_sums_of_terms_that_cancel(kind: str, big: float) -> None:
    """No sample adds more than the bound: where terms cancel too much, one look is taken, and then others."""
    factor, _ = test_rounding.cancelling(kind, big, torch.float32)
    for i in range(factor.batch):
        assert float(clipped(factor[i : i + 1]).norm()) <= 1 + 1e-3


def clipped(factor: Factor) -> torch.Tensor:
    """The clipped sum of one factor, to the bound 1."""
    reduction = ps.ClippedSum(1.0)
    reduction.start(Call({"w": torch.zeros(factor.shape)}, factor.batch, factor.device, dict))
    reduction.add("w", factor)
    return reduction.clip()[1]["w"]


@pytest.mark.parametrize("T", [1, 200])
def test_float32_overflows_beside_float64(T: int) -> None:
    """Norms that are kept in float64 because of another parameter are infinite where float32 gradients are."""
    narrow, wide = torch.ones(600, 900, requires_grad=True), torch.ones(2, requires_grad=True, dtype=torch.float64)
    x = torch.full((3, T, 900), 1e-9)
    x[1] = 1e25

    def losses() -> torch.Tensor:
        return (x @ narrow.t()).mul(torch.full((), 1e14)).double().sum((1, 2)) * wide.sum()

    norms = ps.norms(losses(), [narrow, wide], per="parameter")
    assert norms[0].isfinite().tolist() == [True, False, True]
    with pytest.raises(ps.NonFiniteError):
        ps.clipped_sum(losses(), [narrow, wide], 1.0)
