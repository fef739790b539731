"""Factors that are asked together answer as each does alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from persample.factors import Dense, Factor, Outer, View, Workspace, bounded_sums, family, find_norms
from persample.factors.moves import Permute
from tests.factors import COMPLEX, FACTORS, numbers, outer_of
from tests.factors.test_algebra import assert_near, flat, precision
from tests.factors.test_rounding import cancelling, spoil

WITH_KIN = [
    pytest.param(name, dtype, id=f"{name}-{dtype}".replace("torch.", ""))
    for dtype, names in ((torch.float64, FACTORS), (torch.complex128, COMPLEX), (torch.bfloat16, FACTORS))
    for name in names
    if type(FACTORS[name](1, dtype)[0]) in (Dense, Outer)
]
SMALL = [case for case in WITH_KIN if "blocks" not in str(case.values[0])]


def triplets(name: str, B: int, dtype: torch.dtype) -> list[Factor]:
    """Three of one kin, with different gradients."""
    made = FACTORS[name](B, dtype)[0]
    assert isinstance(made, (Dense, Outer))
    if isinstance(made, Dense):
        return [Dense(made.value * k) for k in (1, -3, 0.5)]
    return [Outer(made.left * k, made.right.flip(0), made.scale) for k in (1, -3, 0.5)]


def alone(factor: Factor) -> Factor:
    """The same, knowing nothing."""
    return factor[:]


@pytest.mark.parametrize("B", [3, 1, 0])
@pytest.mark.parametrize(("name", "dtype"), SMALL)
def test_norms_and_sums_of_kin(name: str, dtype: torch.dtype, B: int) -> None:
    group = triplets(name, B, dtype)
    assert len({family(f) for f in group}) == 1
    assert family(group[0]) is not None
    find_norms(group, Workspace())
    weights = numbers(torch.float64, B).abs()
    sums = bounded_sums({str(i): f for i, f in enumerate(group)}, weights, Workspace())
    for i, factor in enumerate(group):
        single = alone(factor)
        want = single.norms()
        assert factor.knows_norms
        assert_near(factor.norms(), want, 1 + want, precision(factor))
        total = single.bounded_sum(weights)
        assert sums[str(i)].dtype == factor.dtype
        assert_near(sums[str(i)], total, 10 + 10 * float(flat(total.unsqueeze(0)).norm()), precision(factor))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", "dense outer-T1 outer-T2 outer-T40 outer-gram outer-groups-gram".split())
def test_what_is_not_finite_stays_in_its_factor(name: str, value: float) -> None:
    group, wants = triplets(name, 3, torch.float64), [f.norms() for f in triplets(name, 3, torch.float64)]
    spoil(group[1], 2, value)
    find_norms(group, Workspace())
    assert not bool(group[1].norms()[2].isfinite())
    for k, (factor, want) in enumerate(zip(group, wants, strict=True)):
        others = [0, 1] if k == 1 else [0, 1, 2]
        assert_near(factor.norms()[others], want[others], want[others], 1e-12)
    weights = torch.ones(3, dtype=torch.float64)
    sums = bounded_sums({"a": group[0], "b": group[1], "c": group[2]}, weights, Workspace())
    for found, k in ((sums["a"], 0), (sums["c"], 2)):
        assert_near(found, triplets(name, 3, torch.float64)[k].weighted_sum(weights), 100)


@pytest.mark.parametrize("big", [1.0, 1e4, 1e6])
@pytest.mark.parametrize("kind", ["outer", "outer-written-out", "groups"])
def test_samples_that_cancel_are_known_to_their_own_factor(kind: str, big: float) -> None:
    """Terms of one factor of a group cancel: its norms are right, no sample adds more, and the others are as before."""
    factor, want = cancelling(kind, big, torch.float32)
    assert isinstance(factor, Outer)
    calm = Outer(torch.randn(factor.left.shape), torch.randn(factor.right.shape))
    group = [calm, factor, alone(calm)]
    find_norms(group, Workspace())
    norms = flat(want).norm(dim=1)
    allowed = torch.maximum(1e-6 * norms, 16 * torch.finfo(torch.float32).eps * factor.sizes())
    assert bool(((factor.norms() - norms).abs() <= allowed).all())
    assert torch.equal(factor.doubtful(), alone(factor).doubtful())
    assert not calm.doubtful().numel()
    for i in range(4):
        weights = torch.zeros(4, dtype=torch.float64).index_fill(0, torch.tensor(i), 1) / factor.norms()
        sums = bounded_sums(dict(zip("abc", group, strict=True)), weights, Workspace())
        assert float(sums["b"].norm()) <= 1 + 1e-3
        assert_near(sums["a"], alone(calm).weighted_sum(weights), 1 + float(sums["a"].norm()), 1e-5)


def test_factors_of_every_kind_at_once() -> None:
    """Whatever has kin is summed with it, the rest alone; tiny weights are written out; the mapping is emptied."""
    names = [name for name in FACTORS if "blocks" not in name]
    weights = torch.tensor([0.5, 1e-40, 2.0], dtype=torch.float64)
    for w in (weights.clamp(min=1e-3), weights):
        factors = {name: FACTORS[name](3, torch.float64)[0] for name in names for _ in range(2)}
        factors |= {f"{name} again": FACTORS[name](3, torch.float64)[0] for name in names}
        sums = bounded_sums(factors, w, Workspace())
        assert not factors
        for name in names:
            want = FACTORS[name](3, torch.float64)
            total = want[0].bounded_sum(w).to(want[0].dtype)
            assert torch.equal(sums[name], sums[f"{name} again"])
            assert_near(sums[name], total, 10 + 10 * float(flat(total.unsqueeze(0)).norm()), precision(want[0]))


def test_other_shapes_dtypes_and_scales_are_no_kin() -> None:
    def kin(*shape: int, dtype: torch.dtype = torch.float32) -> object:
        return Dense(torch.ones(shape, dtype=dtype)).kin

    assert len({kin(3, 4), kin(4, 3), kin(3, 4, 1), kin(3, 4, dtype=torch.float64)}) == 4
    left, right = torch.ones(3, 1, 4), torch.ones(3, 1, 5)
    outers = [Outer(left, right), Outer(left, right, 2.0), Outer(right, left), Outer(left.double(), right.double())]
    assert len({f.kin for f in outers}) == 4
    assert Outer(left, right, memo={}).kin is None
    assert family(Dense(torch.ones(2, 2**20))) is None


def test_sums_own_their_memory() -> None:
    """A sum that is kept keeps no other alive."""
    group: dict[str, Factor] = {str(k): Dense(torch.ones(3, 4)) for k in range(5)}
    group |= {f"outer {k}": Outer(torch.ones(3, 1, 4), torch.ones(3, 1, 5)) for k in range(5)}
    sums = bounded_sums(group, torch.ones(3), Workspace())
    assert all(s.untyped_storage().nbytes() == s.nbytes for s in sums.values())


def test_a_view_is_measured_by_its_base() -> None:
    """If nothing is lost: the base's norms, and the base's doubts."""
    factor, want = cancelling("outer", 1e6, torch.float32)
    view = View(factor, (20, 30), Permute((1, 0)))
    assert view.measured is factor
    find_norms([view.measured], Workspace())
    assert_near(view.norms(), factor.norms(), 1.0)
    assert torch.equal(view.doubtful(), factor.doubtful())
    weights = 1 / view.norms()
    assert_near(view.bounded_sum(weights).t(), factor.bounded_sum(weights), 1.0, 1e-6)
    assert want.shape[1:] == (30, 20)


def test_a_factor_that_is_asked_twice_in_a_group() -> None:
    factor, want = outer_of(numbers(torch.float64, 3, 1, 4), numbers(torch.float64, 3, 1, 5))
    find_norms([factor, factor], Workspace())
    assert_near(factor.norms(), flat(want).norm(dim=1), 10)


def test_norms_that_are_known_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    group = triplets("dense", 3, torch.float64)
    known = torch.stack([factor.norms() for factor in group])

    def computed(self: Dense, space: Workspace) -> Tensor:
        raise AssertionError("norms are known")

    monkeypatch.setattr(Dense, "_compute_norms", computed)
    assert torch.equal(find_norms(group, Workspace()), known)
