"""Norms of convolutions' gradients in all ways, and when each is taken."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from persample.factors import Convolution, Workspace
from persample.factors import convolution as module
from persample.kernels.convolution import choose, pixel_gram, pixel_gram_norms, use_kernel
from tests.kernels.conv_cases import CASES, Case, case

WIDE = case((8, 8), (3, 3), padding=1, d=32, p=32)


def factor_of(c: Case, x: Tensor, dy: Tensor) -> Convolution:
    return Convolution(x, dy, c.weight_size, c.geometry)


def norms_of(stack: Tensor) -> Tensor:
    return stack.double().flatten(1).norm(dim=1)


@pytest.mark.parametrize("rows", [1, 8, 256])
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("c", CASES.values(), ids=CASES)
def test_pixel_gram_norms(c: Case, images: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of any size, every geometry."""
    monkeypatch.setattr(pixel_gram, "ROWS", rows)
    x, dy = c.tensors(3, images)
    norms, holds = pixel_gram_norms(x, dy, c.weight_size, c.geometry, x.dtype)
    assert bool(holds.all())
    each = norms.view(3, c.geometry.groups).norm(dim=1)
    torch.testing.assert_close(each, norms_of(c.reference(x, dy)), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("limit", [1, 20_000, 2**24])
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("way", Convolution.NORMS)
@pytest.mark.parametrize("c", CASES.values(), ids=CASES)
def test_norms_in_every_way(c: Case, way: str, images: int, limit: int) -> None:
    """In portions of any size, every geometry."""
    x, dy = c.tensors(3, images)
    norms = Convolution.NORMS[way](factor_of(c, x, dy), Workspace(limit))
    torch.testing.assert_close(norms, norms_of(c.reference(x, dy)), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("samples", [0, 1, 5])
def test_norms_of_any_number_of_samples(samples: int) -> None:
    x, dy = WIDE.tensors(samples, 1)
    norms = factor_of(WIDE, x, dy).norms()
    torch.testing.assert_close(norms, norms_of(WIDE.reference(x, dy)), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("c", "way"),
    [
        (case((32, 32), (3, 3), padding=1, d=32, p=32), "stack"),
        (case((16, 16), (3, 3), padding=1, groups=64, d=1, p=1), "stack"),
        (case((12, 12), (4, 4), stride=2, d=24, p=32), "positions"),
        (case((8, 8), (3, 3), padding=1, d=128, p=128), "pixels"),
        (case((4, 4), (3, 3), padding=1, d=256, p=256), "pixels"),
        (case((12, 12), (3, 3), padding=1, stride=2, d=128, p=256), "patches"),
    ],
)
def test_the_cheapest_way_is_taken(c: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured."""
    x, dy = c.tensors(64, 1, torch.float32)
    taken: list[str] = []
    for name, plain in Convolution.NORMS.items():
        spy = partial(lambda name, plain, *args: taken.append(name) or plain(*args), name, plain)
        monkeypatch.setitem(Convolution.NORMS, name, spy)  # type: ignore[arg-type]
    norms = factor_of(c, x, dy).norms()
    assert taken == [way]
    torch.testing.assert_close(norms, norms_of(c.reference(x, dy)), rtol=1e-5, atol=0)


def test_a_preferred_kernel_writes_the_gradients_whose_norms_are_taken() -> None:
    c = case((4, 4), (3, 3), padding=1, d=256, p=256)
    sizes = factor_of(c, *c.tensors(64, 1, torch.float32))._sizes
    assert choose(sizes, "norms") == "pixels"
    with use_kernel("unfold"):
        assert choose(sizes, "norms") == "stack"
    with use_kernel("pointwise"):  # which cannot do it
        assert choose(sizes, "norms") == "pixels"


@pytest.mark.parametrize("way", ["patches", "pixels"])
def test_samples_that_cancel_or_vanish_are_written_out(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case((4, 4), (3, 3), padding=1, d=48, p=48)
    x, dy = c.tensors(5, 2, torch.float32)
    x[1, 1], dy[1, 1] = x[1, 0] + 1e-5, -dy[1, 0]  # its two images' gradients nearly cancel
    x[2] *= 1e-25
    dy[3] = 0
    written: list[int] = []
    plain = Convolution.stack
    monkeypatch.setattr(Convolution, "stack", lambda self, out=None: written.append(self.batch) or plain(self, out))
    norms = Convolution.NORMS[way](factor_of(c, x, dy), Workspace())
    assert 2 <= sum(written) <= 3
    expected = norms_of(c.reference(x, dy))
    assert expected[1] < 1e-3 * expected[0]
    terms = x.double().flatten(1).norm(dim=1) * dy.double().flatten(1).norm(dim=1) * 3
    assert bool(((norms - expected).abs() <= torch.maximum(1e-5 * expected, 1e-6 * terms)).all())
    assert norms[3] == 0
    assert norms[2] == pytest.approx(float(expected[2]), rel=1e-5)


@pytest.mark.parametrize("way", Convolution.NORMS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_samples_that_are_not_finite(value: float, way: str) -> None:
    x, dy = WIDE.tensors(3, 1)
    expected = norms_of(WIDE.reference(x, dy))
    x[1, 0, 3, 2, 2] = value
    norms = Convolution.NORMS[way](factor_of(WIDE, x, dy), Workspace())
    assert not bool(norms[1].isfinite())
    torch.testing.assert_close(norms[[0, 2]], expected[[0, 2]], rtol=1e-10, atol=0)


@pytest.mark.parametrize("way", Convolution.NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(dtype: torch.dtype, way: str) -> None:
    x, dy = WIDE.tensors(3, 1, dtype)
    norms = Convolution.NORMS[way](factor_of(WIDE, x, dy), Workspace())
    torch.testing.assert_close(
        norms, norms_of(WIDE.reference(x, dy)), rtol=2e-2 if way in ("stack", "positions") else 1e-5, atol=0
    )


@pytest.mark.parametrize("way", Convolution.NORMS)
def test_elements_too_large_for_half_precision(way: str) -> None:
    """Such a gradient is infinite, and so is its norm."""
    x, dy = WIDE.tensors(3, 1, torch.float16)
    x[1] *= 1e3
    dy[1] *= 1e3
    norms = Convolution.NORMS[way](factor_of(WIDE, x, dy), Workspace())
    assert norms.isinf().tolist() == [False, True, False]


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
