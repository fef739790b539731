"""Norms of rows: right to the last digits, whatever the size of rows and elements."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from persample.kernels.norms import row_norms

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
# Below and above what is summed in float64 at once, and looked at again as a whole; and rows of several runs.
SHAPES = [(0, 3), (3, 0), (1, 1), (5, 7), (5, 2, 3), (300, 70), (2, 9000), (1100, 1000), (3, 400_000)]


def expected(rows: Tensor) -> Tensor:
    """In float64, divided by the largest element first."""
    if not rows.numel():
        return torch.zeros(len(rows), dtype=torch.float64)
    wide = rows.to(torch.complex128 if rows.is_complex() else torch.float64).reshape(len(rows), -1)
    largest = wide.abs().amax(1, keepdim=True)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1)
    return torch.linalg.vector_norm(wide / scale, dim=1) * scale.squeeze(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(shape).to(dtype) if not dtype.is_complex else torch.randn(shape, dtype=dtype)
    found = row_norms(rows)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected(rows), rtol=1e-12 if dtype == torch.complex128 else 1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] > 2 and s[1]], ids=str)
@pytest.mark.parametrize("size", ["vanishing", "huge", "zero", "inf", "nan", "all"])
def test_rows_that_squares_would_spoil(shape: tuple[int, ...], dtype: torch.dtype, size: str) -> None:
    """Beside others that are as usual."""
    torch.manual_seed(0)
    rows = torch.randn(shape, dtype=dtype)
    info = torch.finfo(dtype)
    factors = {"vanishing": info.tiny, "huge": info.max / 1e4, "zero": 0.0, "inf": float("inf"), "nan": float("nan")}
    if size == "all":
        rows *= factors["vanishing"]
    else:
        rows[1] *= factors[size]
    if size == "inf":
        rows[1] = float("inf")
    torch.testing.assert_close(row_norms(rows), expected(rows), rtol=1e-5, atol=0, equal_nan=True)
