"""Exact sums: shares are whole numbers that add up in any order, and no sample's is larger than the bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from persample.factors import (
    Convolution,
    Deferred,
    Dense,
    Factor,
    Masked,
    Outer,
    Part,
    Rows,
    Sum,
    View,
    Workspace,
    split,
)
from persample.factors.limits import Limits, Unit
from persample.factors.rearrange import AsComplex, Cast, Permute, Reshape, Section
from persample.kernels.convolution import Geometry

B = 12
Make = Callable[[torch.dtype], Factor]
KINDS: dict[str, Make] = {}


def kind(fn: Make) -> Make:
    KINDS[fn.__name__] = fn
    return fn


def r(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def of_any_size(t: Tensor) -> Tensor:
    """Samples of very different sizes, one of them zero."""
    reach = 1 if t.dtype == torch.float16 else 12
    powers = torch.linspace(-reach, reach, len(t), dtype=torch.float64)
    sizes = (10**powers).view(-1, *[1] * (t.ndim - 1)).to(t.dtype)
    out = t * sizes[torch.randperm(len(t))]
    out[-1] = 0
    return out


@kind
def dense(dtype: torch.dtype) -> Factor:
    return Dense(of_any_size(r(B, 3, 5, dtype=dtype)))


@kind
def masked(dtype: torch.dtype) -> Factor:
    return Masked(r(7, 3, dtype=dtype), torch.randint(-1, B, (7, 1)), B)


@kind
def outer(dtype: torch.dtype) -> Factor:
    return Outer(of_any_size(r(B, 1, 4, dtype=dtype)), of_any_size(r(B, 1, 6, dtype=dtype)), -0.3)


@kind
def one_sided(dtype: torch.dtype) -> Factor:
    """Nothing on the right of some samples, and nothing on the left of others."""
    left, right = r(B, 1, 4, dtype=dtype), r(B, 1, 6, dtype=dtype)
    left[1::3], right[::3] = 0, 0
    return Outer(left, right)


@kind
def positions(dtype: torch.dtype) -> Factor:
    return Outer(of_any_size(r(B, 9, 4, dtype=dtype)), of_any_size(r(B, 9, 6, dtype=dtype)))


@kind
def gram(dtype: torch.dtype) -> Factor:
    """Few positions and many features: norms come from Gram matrices."""
    factor = Outer(of_any_size(r(B, 5, 150, dtype=dtype)), r(B, 5, 170, dtype=dtype))
    assert not factor.prefers_stack(False)
    return factor


@kind
def cancelling(dtype: torch.dtype) -> Factor:
    """Terms that are far larger than their sum, or leave nothing of it."""
    left, right = r(B, 1, 30, dtype=dtype), r(B, 2, 40, dtype=dtype)
    right[:, 1] = right[:, 0]
    right[::2, 1] *= 1 + 1e-3
    return Outer(torch.cat([left, -left], 1) * 1e6 if dtype != torch.float16 else torch.cat([left, -left], 1), right)


@kind
def grouped(dtype: torch.dtype) -> Factor:
    return Outer(of_any_size(r(B, 2, 5, 3, dtype=dtype)), r(B, 2, 5, 4, dtype=dtype))


@kind
def rows(dtype: torch.dtype) -> Factor:
    return Rows(torch.randint(-1, 5, (B, 7)), of_any_size(r(B, 7, 3, dtype=dtype)), 5)


@kind
def convolution(dtype: torch.dtype) -> Factor:
    geometry = Geometry((1, 1), (1, 1), (1, 1), transposed=False, output_padding=(0, 0), groups=2)
    x, dy = of_any_size(r(B, 1, 4, 6, 6, dtype=dtype)), of_any_size(r(B, 1, 6, 6, 6, dtype=dtype))
    return Convolution(x, dy, (6, 2, 3, 3), geometry)


@kind
def transposed(dtype: torch.dtype) -> Factor:
    geometry = Geometry((2,), (0,), (1,), transposed=True, output_padding=(0,), groups=1)
    return Convolution(r(B, 2, 3, 5, dtype=dtype), r(B, 2, 4, 11, dtype=dtype), (3, 4, 3), geometry)


@kind
def moved(dtype: torch.dtype) -> Factor:
    base = View(outer(dtype), (6, 4), Permute((1, 0)))
    return View(View(base, (24,), Reshape((6, 4), (24,))), (30,), Section((30,), 0, 3, 27))


@kind
def cast(dtype: torch.dtype) -> Factor:
    return View(positions(dtype), (4, 6), Cast(dtype, torch.float64))


@kind
def tied(dtype: torch.dtype) -> Factor:
    ids = torch.randint(0, 90, (B, 3))
    return Sum([Outer(r(B, 3, 90, dtype=dtype), r(B, 3, 40, dtype=dtype)), Rows(ids, r(B, 3, 40, dtype=dtype), 90)])


@kind
def several(dtype: torch.dtype) -> Factor:
    return Sum([Dense(r(B, 4, 6, dtype=dtype)), positions(dtype), outer(dtype)])


@kind
def deferred(dtype: torch.dtype) -> Factor:
    whole = positions(dtype)
    assert isinstance(whole, Outer)
    return Deferred(lambda some: whole[some], B, 9, (4, 6), whole.tensors, 5)


@kind
def part(dtype: torch.dtype) -> Factor:
    whole = Outer(r(2 * B, 2, 3, dtype=dtype), r(2 * B, 2, 4, dtype=dtype))
    return split(whole, 2)[1]


@kind
def complex_dense(dtype: torch.dtype) -> Factor:
    return Dense(torch.randn(B, 3, 2, dtype=torch.complex64 if dtype != torch.float64 else torch.complex128))


@kind
def complex_outer(dtype: torch.dtype) -> Factor:
    given = torch.complex64 if dtype != torch.float64 else torch.complex128
    return View(Outer(torch.randn(B, 2, 3, dtype=given), torch.randn(B, 2, 4, dtype=given)), (4, 3), Permute((1, 0)))


@kind
def as_complex(dtype: torch.dtype) -> Factor:
    real = dtype if dtype == torch.float64 else torch.float32
    return View(Dense(torch.randn(B, 4, 2, dtype=real)), (4,), AsComplex(real.to_complex()))


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
everything = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}") for name in KINDS for dtype in DTYPES
]


def made(name: str, dtype: torch.dtype) -> Factor:
    torch.manual_seed(0)
    return KINDS[name](dtype)


def capped(factor: Factor, bound: float, unit: Unit) -> Tensor:
    """The weights of a clipped sum."""
    limits = factor.integer_sum(unit, Workspace()).limits
    return torch.minimum((bound / factor.norms()).clamp(max=1), limits.largest_weights(bound))


def written(factor: Factor) -> Tensor:
    """(B, ...): the gradients, real and in float64, from factors in float64."""
    stack = widened(factor).stack()
    stack = torch.view_as_real(stack) if stack.is_complex() else stack
    return stack.double()


def widened(factor: Factor) -> Factor:
    if isinstance(factor, Outer):
        kind = torch.complex128 if factor.dtype.is_complex else torch.float64
        return Outer(factor.left.to(kind), factor.right.to(kind), factor.scale)
    if isinstance(factor, Rows):
        return Rows(factor.ids, factor.dy.double(), factor.size)
    if isinstance(factor, Convolution):
        return Convolution(factor.x.double(), factor.dy.double(), factor.size, factor.geometry)
    if isinstance(factor, Sum):
        return Sum([widened(term) for term in factor.terms])
    if isinstance(factor, View):
        move = Cast(torch.float64, torch.float64) if isinstance(factor.rearrange, Cast) else factor.rearrange
        return View(widened(factor.base), factor.shape, move)
    if isinstance(factor, Deferred):
        return widened(factor.compute_all())
    if isinstance(factor, Part):
        return widened(factor.standalone)
    if isinstance(factor, Masked):
        return Masked(factor.value.double(), factor.index, factor.batch)
    assert isinstance(factor, Dense)
    return factor


@pytest.mark.parametrize(("name", "dtype"), everything)
@pytest.mark.parametrize("bound", [1e-3, 0.7, 50.0])
def test_no_sample_adds_more_than_the_bound(name: str, dtype: torch.dtype, bound: float) -> None:
    factor, unit = made(name, dtype), Unit.below(bound, 1000)
    weights = capped(factor, bound, unit)
    for b in range(B):
        share = factor[b : b + 1].integer_sum(unit, Workspace()).totals(weights[b : b + 1])[0]
        assert share.dtype == unit.dtype
        assert math.sqrt(sum(int(n) ** 2 for n in share.flatten())) * unit.size <= bound


@pytest.mark.parametrize(("name", "dtype"), everything)
def test_shares_add_up_in_any_order(name: str, dtype: torch.dtype) -> None:
    factor, unit = made(name, dtype), Unit.below(1.0, 1000)
    weights = capped(factor, 1.0, unit)
    whole = factor.integer_sum(unit, Workspace()).totals(weights)[0]
    for space in (Workspace(), Workspace(1)):
        apart = [
            factor[b : b + 1].integer_sum(unit, space).totals(weights[b : b + 1])[0] for b in torch.randperm(B).tolist()
        ]
        assert torch.equal(torch.stack(apart).sum(0), whole)
    order = torch.randperm(B)
    assert torch.equal(factor[order].integer_sum(unit, Workspace(1)).totals(weights[order])[0], whole)


@pytest.mark.parametrize(("name", "dtype"), everything)
def test_shares_are_the_weighted_gradients(name: str, dtype: torch.dtype) -> None:
    """To within what `Limits` say, and to five digits of the bound where nothing cancels."""
    factor, unit = made(name, dtype), Unit.below(1.0, 1000)
    exact = factor.integer_sum(unit, Workspace())
    weights = capped(factor, 1.0, unit)
    want = (written(factor) * weights.view(-1, *[1] * (written(factor).ndim - 1))).sum(0)
    found = exact.totals(weights)[0].double() * unit.size
    assert found.shape == want.shape
    stored = 0.0 if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).eps  # where it is written out
    slack = weights.sqrt() * exact.limits.root + exact.limits.constant + weights * (2e-6 + stored) * exact.limits.terms
    assert float((found - want).norm()) <= float(slack.sum()) + 1e-12
    if name != "cancelling":
        torch.testing.assert_close(found, want, atol=2e-4 if not stored else 0.2, rtol=0)


@pytest.mark.parametrize(("name", "dtype"), everything)
def test_bounds_hold(name: str, dtype: torch.dtype) -> None:
    """Norms are not above their bounds, and these not far above them where nothing cancels."""
    factor = made(name, dtype)
    norms, bounds = written(factor).flatten(1).norm(dim=1), factor.norm_bounds(Workspace())
    assert bool((norms <= bounds).all())
    if name != "cancelling":
        loose = 1.002 if dtype in (torch.float32, torch.float64) else 1.1
        assert bool((bounds <= norms * loose + 1e-12).all()), (bounds / norms).tolist()


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_of_nobody(name: str) -> None:
    factor, unit = made(name, torch.float32)[:0], Unit.below(1.0, 10)
    exact = factor.integer_sum(unit, Workspace())
    assert exact.limits.largest_weights(1.0).shape == (0,)
    total = exact.totals(torch.zeros(0, dtype=torch.float64))[0]
    assert total.shape[: len(factor.shape)] == factor.shape
    assert not total.any()


def test_a_ratchet_does_not_turn() -> None:
    """A sum near a power of two rounds small terms away, or up, all in the same direction: whole numbers do not."""
    big, small = torch.full((1, 1), 1.0), torch.full((4096, 1), 2.0**-24 * 1.5)
    value = torch.cat([big, small])
    in_float32 = torch.zeros(1)
    for row in value:
        in_float32 += row
    unit = Unit.below(1.0, len(value))
    total = Dense(value).integer_sum(unit, Workspace()).totals(torch.ones(len(value), dtype=torch.float64))[0]
    true = value.double().sum()
    assert abs(float(in_float32) - true) > 1e-4  # the attack works
    assert abs(float(total) * unit.size - true) < 1e-9


@pytest.mark.parametrize("samples", [1, 1000, 10**5, 10**7, 10**9])
def test_sums_of_so_many_samples_fit(samples: int) -> None:
    for bound in (1e-6, 1.0, 3.0, 1e8):
        assert samples * bound / Unit.below(bound, samples).size < 2**62


def test_weights_that_leave_no_room_are_zero() -> None:
    limits = Limits(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]), 2.0, torch.tensor([1.0, 0.0]))
    assert limits.largest_weights(1.0).tolist()[0] == 0.0


@pytest.mark.parametrize(("positions", "left", "right"), [(31, 1024, 1024), (96, 2500, 300), (16, 512, 40)])
def test_bounds_are_close_where_features_are_many(positions: int, left: int, right: int) -> None:
    """Gram matrices are summed in short runs: their bounds grow with these, not with the number of features."""
    torch.manual_seed(0)
    factor = Outer(torch.randn(2, positions, left), torch.randn(2, positions, right))
    assert not factor.prefers_stack(False)
    assert bool((factor.norm_bounds(Workspace()) <= 1.005 * factor.norms()).all())


@pytest.mark.parametrize("name", ["dense", "outer", "positions", "gram", "convolution", "rows", "several", "moved"])
@pytest.mark.parametrize("limit", [1, 700, 2000, None])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_parts_are_summed_on_their_own(name: str, parts: int, limit: int | None) -> None:
    """However many samples fit into memory at a time, which need not be a part of them."""
    factor, unit = made(name, torch.float32), Unit.below(1.0, 1000)
    weights, each = capped(factor, 1.0, unit), B // parts
    found = factor.integer_sum(unit, Workspace(limit)).totals(weights, parts)
    assert len(found) == parts
    for k in range(parts):
        some = slice(k * each, (k + 1) * each)
        assert torch.equal(found[k], factor[some].integer_sum(unit, Workspace()).totals(weights[some])[0])
