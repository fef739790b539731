"""Loops over samples and over chunks of a batch: what one call for all samples gives, for every case there is."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import persample as ps
from tests.cases import CASES, Case
from tests.reference import assert_same, definition

# What PyTorch has compiled, it cannot run backwards a second time, as the definition does.
CASES_IN_LOOPS = [case for case in CASES if not case.interacts and case.name != "compiled_model"]
SIZES = {case: {min(b for b in case.batches if b), max(case.batches)} for case in CASES_IN_LOOPS}
LOOPED = [pytest.param(case, B, id=f"{case}-B{B}") for case, sizes in SIZES.items() for B in sorted(sizes)]
FEW = LOOPED[::9]


def in_a_loop(case: Case, B: int) -> None:
    """Three passes of a program, whose losses are put together in another order."""
    params, forward = case.build(B)
    order = torch.randperm(3 * B, generator=torch.Generator().manual_seed(B))

    def losses() -> Tensor:
        return torch.cat([forward(), forward() * 2, forward() * -3])[order]

    want = definition(losses(), params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ps.PerformanceWarning)
        assert_same(ps.grad(losses(), params), want, rtol=case.rtol)
        norms = ps.norms(losses(), params)
    rows = [g.reshape(len(g), -1).to(torch.complex128 if g.is_complex() else torch.float64) for g in want.values()]
    whole = torch.cat(rows, 1)
    near(norms, whole.norm(dim=1), case.rtol)


def near(got: Tensor, want: Tensor, rtol: float) -> None:
    assert bool(((got.double() - want).abs() <= 10 * rtol * want.abs().max().clamp_min(1e-6)).all())


@pytest.mark.parametrize(("case", "B"), FEW)
def test_every_ninth_case_in_a_loop(case: Case, B: int) -> None:
    in_a_loop(case, B)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "B"), [one for one in LOOPED if one not in FEW])
def test_other_cases_in_a_loop(case: Case, B: int) -> None:
    in_a_loop(case, B)
