"""Left and right second moments of factors of every form, against their gradients written out."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor

import persample as ps
from persample.factors import Dense, Factor, Outer, Workspace
from persample.reductions.base import Call
from tests.cases import CASES, Case, warnings_of
from tests.factors import FACTORS
from tests.factors.test_algebra import EVERY, SPACES, precision
from tests.reference import definition


def matrices(gradients: Tensor) -> Tensor:
    """(B, n, m) in float64; a complex number is two columns."""
    n = gradients.shape[1] if gradients.ndim > 1 else 1
    real = torch.view_as_real(gradients.resolve_conj()) if gradients.is_complex() else gradients
    return real.double().reshape(len(real), n, prod(gradients.shape[2:]) * (2 if gradients.is_complex() else 1))


def assert_moments(factor: Factor, gradients: Tensor, space: Workspace | None, tolerance: float) -> None:
    g = matrices(gradients)
    left, right = g.transpose(0, 1).flatten(1), g.flatten(0, 1)
    size = float(g.square().sum()) + 1e-20  # gradients that are zero but for rounding are about 1e-17
    wants = left @ left.t(), right.t() @ right
    for found in (factor.moments(True, True, space), (factor.left_moment(space), factor.right_moment(space))):
        for have, want in zip(found, wants, strict=True):
            assert have is not None
            assert have.shape == want.shape
            assert have.dtype in (torch.float32, torch.float64)
            assert float((have.double() - want).abs().amax() if want.numel() else 0) <= tolerance * size
    assert factor.moments(False, False, space) == (None, None)
    generator = torch.Generator().manual_seed(0)
    for k in (None, 2):
        turns = [None if k is None else torch.randn(n, k, generator=generator).double() for n in g.shape[1:]]
        turned = g if turns[0] is None or turns[1] is None else turns[0].t() @ g @ turns[1]
        have = factor.rotated_squares(turns[0], turns[1], space)
        assert have.shape == turned.shape[1:]
        bound = tolerance * size * (1 if k is None else 10 * g.shape[1] * g.shape[2])
        assert float((have.double() - turned.square().sum(0)).abs().amax() if have.numel() else 0) <= bound


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("B", [3, 1, 0])
@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_every_form(name: str, dtype: torch.dtype, B: int, space: str) -> None:
    factor, want = FACTORS[name](B, dtype)
    assert_moments(factor, want, SPACES[space](), max(1e-10, precision(factor)))


@pytest.mark.parametrize("T", [0, 1, 2, 9])
@pytest.mark.parametrize(("p", "d"), [(1, 1), (3, 3), (20, 2), (2, 20), (12, 15)])
def test_products_with_few_and_many_positions(T: int, p: int, d: int) -> None:
    """Both ways to moments, with a scale, and with sides that are expanded or transposed."""
    g = torch.Generator().manual_seed(1)
    left = torch.randn(T, 3, p, generator=g, dtype=torch.float64).transpose(0, 1)
    right = torch.randn(3, 1, d, generator=g, dtype=torch.float64).expand(3, T, d)
    factor = Outer(left, right, -0.5)
    assert_moments(factor, factor.stack(), Workspace(), 1e-12)
    assert_moments(factor[:0], factor.stack()[:0], Workspace(), 1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3, 4), (0, 3), (3, 0)])
def test_shapes_of_gradients(shape: tuple[int, ...]) -> None:
    value = torch.randn(5, *shape, dtype=torch.float64)
    assert_moments(Dense(value), value, Workspace(), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("T", [1, 4])
def test_sums_of_low_precision_are_not(dtype: torch.dtype, T: int) -> None:
    """Moments of half precision are added up in float32: 4096 ones in bfloat16 would stop at 256."""
    ones = torch.ones(4096, T, 2, dtype=dtype)
    left, right = Outer(ones, ones).moments(True, True)
    assert left is not None
    assert left.dtype == torch.float32
    torch.testing.assert_close(left, torch.full((2, 2), 4096.0 * T * T * 2))
    torch.testing.assert_close(right, left)


class Moments(ps.Reduction):
    """All three questions, for every parameter that is reached."""

    def start(self, call: Call) -> None:
        self.call, self.factors = call, dict[str, Factor]()
        self.checked = 0

    def __init__(self, want: dict[str, Tensor], tolerance: float) -> None:
        self.want, self.tolerance = want, tolerance

    def add(self, name: str, factor: Factor) -> None:
        assert_moments(factor, self.want[name], self.call.space, self.tolerance)
        self.checked += 1

    def result(self) -> int:
        return self.checked


DOUBLE = [case for case in CASES if not case.interacts]
PARAMS = [pytest.param(c, id=str(c), marks=[] if i % 6 == 0 else [pytest.mark.slow]) for i, c in enumerate(DOUBLE)]


@pytest.mark.parametrize("case", PARAMS)
def test_every_case(case: Case) -> None:
    params, forward = case.build(case.batches[0])
    losses = forward()
    want = definition(losses, params)
    dtypes = {g.dtype for g in want.values()}
    low = dtypes & {torch.float16, torch.bfloat16, torch.float32, torch.complex64}
    if any(not bool(torch.isfinite(g.abs().double().square()).all()) for g in want.values()) or low:
        return  # what is promised of half precision and of overflows is tested with factors
    with warnings_of(case):
        checked = ps.reduce(losses, params, Moments(want, 1e-9))[0]
    assert checked > 0 or not any(bool((g != 0).any()) for g in want.values())
