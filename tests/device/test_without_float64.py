"""A device that has no float64: norms in float32 are scaled and summed in runs; they neither overflow nor drift."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from persample.kernels.norms import row_norms
from tests.cases import CASES, Case
from tests.device.backend import DEVICE, no_float64
from tests.device.test_cases import check_on_device
from tests.reductions.test_cases import BEYOND_RANGE

HALF = (torch.float16, torch.bfloat16)
WIDE = {"float32_model_float64_losses"}
NARROW = [case for case in CASES if case.dtype in (torch.float32, *HALF) and str(case) not in BEYOND_RANGE | WIDE]


@pytest.fixture(autouse=True)
def _narrow() -> Iterator[None]:
    with no_float64():
        yield


def test_the_device_refuses_it() -> None:
    with pytest.raises(TypeError, match="no float64"):
        torch.ones(3, device=DEVICE).double()


@pytest.mark.parametrize("case", NARROW, ids=str)
def test_all_reductions(case: Case) -> None:
    check_on_device(case, case.batches[0])


@pytest.mark.parametrize("exponent", [-44, -30, -20, 0, 18, 20, 30])
@pytest.mark.parametrize("length", [1, 3, 512, 513, 2000, 300_001])
def test_norms_of_huge_tiny_and_many_numbers(exponent: int, length: int) -> None:
    rows = torch.rand(3, length, generator=torch.Generator().manual_seed(length)) * 10.0**exponent
    rows[0] = 0
    found = row_norms(rows.to(DEVICE))
    assert found.dtype == torch.float32
    want = rows.double().norm(dim=1)
    assert torch.allclose(found.cpu().double(), want, rtol=1e-5, atol=1e-44)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_norms_of_what_is_not_finite(value: float) -> None:
    found = row_norms(torch.tensor([[1.0, value], [3.0, 4.0]]).to(DEVICE)).cpu()
    assert not found[0].isfinite()
    assert float(found[1]) == 5
