"""Norms of convolutions' gradients from Gram matrices of pixels, and when each way is taken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from persample.factors import Convolution, Workspace
from persample.factors import convolution as module
from persample.kernels import conv_gram
from persample.kernels.conv_gram import pixel_gram_norms
from tests.kernels.conv_cases import CASES, Case, case

WIDE = case((8, 8), (3, 3), padding=1, d=32, p=32)  # pixels' Gram matrices are the cheapest way to norms


def factor_of(c: Case, x: Tensor, dy: Tensor) -> Convolution:
    return Convolution(x, dy, c.weight_size, c.geometry)


def norms_of(stack: Tensor) -> Tensor:
    return stack.double().flatten(1).norm(dim=1)


@pytest.mark.parametrize("rows", [1, 8, 256])
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("c", CASES.values(), ids=CASES)
def test_pixel_gram_norms(c: Case, images: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of any size, every geometry."""
    monkeypatch.setattr(conv_gram, "ROWS", rows)
    x, dy = c.tensors(3, images)
    norms, holds = pixel_gram_norms(x, dy, c.weight_size, c.geometry, x.dtype)
    assert bool(holds.all())
    each = norms.view(3, c.geometry.groups).norm(dim=1)
    torch.testing.assert_close(each, norms_of(c.reference(x, dy)), rtol=1e-8, atol=1e-12)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways to norms that were taken."""
    taken: list[str] = []
    for way, name in [("stack", "stack"), ("patches", "_norms_by_gram"), ("pixels", "_norms_by_pixels")]:
        plain = getattr(Convolution, name)

        def spy(self: Convolution, *args: object, _way: str = way, _plain: object = plain) -> object:
            taken.append(_way)
            return _plain(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(Convolution, name, spy)
    return taken


@pytest.mark.parametrize(
    ("c", "way"),
    [
        (case((32, 32), (3, 3), padding=1, d=32, p=32), "stack"),
        (case((16, 16), (3, 3), padding=1, groups=64, d=1, p=1), "stack"),
        (case((8, 8), (3, 3), padding=1, d=128, p=128), "pixels"),
        (case((4, 4), (3, 3), padding=1, d=256, p=256), "pixels"),
        (case((16, 16), (3, 3), padding=1, stride=2, d=128, p=256), "patches"),
        (case((50,), (3,), padding=1, d=256, p=256), "pixels"),
        (case((4, 4, 4), (3, 3, 3), padding=1, d=64, p=64), "pixels"),
    ],
)
def test_the_cheapest_way_is_taken(c: Case, way: str, ways: list[str]) -> None:
    """As measured."""
    x, dy = c.tensors(2, 1, torch.float32)
    norms = factor_of(c, x, dy).norms()
    assert ways == [way]
    torch.testing.assert_close(norms, norms_of(c.reference(x, dy)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("limit", [1, 20_000, 2**24])
@pytest.mark.parametrize("samples", [0, 1, 5])
def test_samples_in_any_portions(samples: int, limit: int, ways: list[str]) -> None:
    x, dy = WIDE.tensors(samples, 1)
    norms = factor_of(WIDE, x, dy).norms(Workspace(limit))
    torch.testing.assert_close(norms, norms_of(WIDE.reference(x, dy)), rtol=1e-10, atol=0)
    assert ways == ["pixels"] * (samples > 0)


def test_samples_that_cancel_or_vanish_are_written_out(ways: list[str]) -> None:
    c = case((4, 4), (3, 3), padding=1, d=48, p=48)
    x, dy = c.tensors(5, 2, torch.float32)
    x[1, 1], dy[1, 1] = x[1, 0] + 1e-5, -dy[1, 0]  # its two images' gradients nearly cancel
    x[2] *= 1e-25
    dy[3] = 0
    norms = factor_of(c, x, dy).norms()
    assert ways == ["pixels", "stack"]
    expected = norms_of(c.reference(x, dy))
    assert expected[1] < 1e-3 * expected[0]
    terms = x.double().flatten(1).norm(dim=1) * dy.double().flatten(1).norm(dim=1) * 3
    assert bool(((norms - expected).abs() <= torch.maximum(1e-5 * expected, 1e-6 * terms)).all())
    assert norms[3] == 0
    assert norms[2] == pytest.approx(float(expected[2]), rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_samples_that_are_not_finite(value: float) -> None:
    x, dy = WIDE.tensors(3, 1)
    expected = norms_of(WIDE.reference(x, dy))
    x[1, 0, 3, 2, 2] = value
    norms = factor_of(WIDE, x, dy).norms()
    assert not bool(norms[1].isfinite())
    torch.testing.assert_close(norms[[0, 2]], expected[[0, 2]], rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(dtype: torch.dtype, ways: list[str]) -> None:
    x, dy = WIDE.tensors(3, 1, dtype)
    norms = factor_of(WIDE, x, dy).norms()
    assert ways == ["pixels"]
    torch.testing.assert_close(norms, norms_of(WIDE.reference(x, dy)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("c", [CASES["2d-vectorised"], CASES["2d-transposed"], case((5, 5), (2, 2), d=5, p=1)])
def test_the_smaller_side_is_weighted(c: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = c.tensors(4, 2)
    weights = torch.tensor([0.5, 0.0, -2.0, 1.0], dtype=x.dtype)
    given: list[tuple[Tensor, Tensor]] = []
    plain = module.weight_summed
    monkeypatch.setattr(module, "weight_summed", lambda x, dy, *rest: given.append((x, dy)) or plain(x, dy, *rest))
    total = factor_of(c, x, dy).weighted_sum(weights)
    torch.testing.assert_close(total, torch.einsum("b,b...->...", weights, c.reference(x, dy)))
    ((used_x, used_dy),) = given
    assert (used_x is x) == (x.numel() >= dy.numel())
    assert (used_dy is dy) == (x.numel() < dy.numel())
