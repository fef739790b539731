"""Every factor answers every question as its gradients, written out, would."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from persample.factors import Dense, Factor, Outer, Sum, View, Workspace, combine
from persample.factors.bounded import bounded_sum
from persample.factors.rearrange import Cast
from tests.factors import (
    COMPLEX,
    FACTORS,
    MOVES,
    SHAPE,
    dense,
    exact,
    numbers,
    outer,
    outer_of,
    rows,
    rows_of,
    total,
)
from tests.reference import flat

CHECKED = settings(
    derandomize=True, deadline=None, database=None, print_blob=False, suppress_health_check=[HealthCheck.too_slow]
)
EVERY = [
    *(pytest.param(name, torch.float64, id=name) for name in FACTORS),
    *(pytest.param(name, torch.complex128, id=f"{name}-complex") for name in COMPLEX),
]
SPACES: dict[str, Callable[[], Workspace | None]] = {"plenty": lambda: None, "tiny": lambda: Workspace(1)}


def assert_near(got: Tensor, want: Tensor, size: Tensor | float = 1.0, rtol: float = 1e-11) -> None:
    """Within ``rtol`` of the size of what was added up."""
    assert got.shape == want.shape
    error = (exact(got) - exact(want)).abs()
    assert bool((error <= rtol * torch.as_tensor(size)).all()), f"off by {float((error / size).max()):.2e}"


def check(factor: Factor, want: Tensor, space: Workspace | None = None, rtol: float = 1e-11) -> None:
    """All questions, by name."""
    B, shape = len(want), tuple(want.shape[1:])
    n, norms = flat(want), flat(want).norm(dim=1)
    assert (factor.batch, factor.shape, factor.numel) == (
        B,
        shape,
        want[0:1].expand(1, *shape).numel() if B else factor.numel,
    )
    assert factor.stack_bytes == B * factor.numel * factor.dtype.itemsize
    size = norms.max() + 1e-3 if B else 1.0
    for out in (None, empty(factor), empty(factor).flip(0), torch.empty_like(want)):
        stack = factor.stack(out)
        assert out is None or stack is out
        assert_near(stack, want, size, rtol)
    there = exact(torch.ones_like(want)).to(factor.dtype)
    factor.add_to(there)
    assert_near(there - 1, want, size + 1, rtol)
    assert_near(factor.norms(space), norms, size, rtol)
    check_sums(factor, want, space, rtol)
    dots = numbers(factor.dtype, 3, *shape)
    for k in (0, 1, 3):
        got = factor.dot(dots[:k], space)
        assert_near(got, n @ flat(dots[:k]).t(), size * (1 + flat(dots).norm()), rtol)
    assert_near(factor.gram(factor, space), n @ n.t(), size**2, rtol)
    for r in (0, 1, 2) if shape else ():
        sides = numbers(factor.dtype, r, prod(shape[:-1])), numbers(factor.dtype, r, shape[-1])
        product = (sides[0].t() @ sides[1]).view(1, *shape)
        got = factor.dot_product(*sides, space)
        assert_near(got, (n @ flat(product).t()).squeeze(1), size * (1 + flat(product).norm()), rtol)
    for first in range(len(shape) + 1) if n.shape[1] else ():
        rows_ = prod(shape[:first])
        columns = n.shape[1] // rows_  # of complex gradients, twice as many
        for few in ((2, 3), (11, 0)):
            left, right = numbers(torch.float64, rows_, few[0]), numbers(torch.float64, columns, few[1])
            z = torch.einsum("bnm,nk,ml->bkl", n.view(B, rows_, columns), left, right)
            assert_near(factor.compress(left, right, space), z, 1 + size * left.norm() * right.norm(), rtol)


def empty(factor: Factor) -> Tensor:
    """A buffer whose contents must not matter."""
    return torch.full((factor.batch, *factor.shape), float("nan"), dtype=factor.dtype)


def check_sums(factor: Factor, want: Tensor, space: Workspace | None, rtol: float) -> None:
    B, center = len(want), numbers(factor.dtype, *want.shape[1:])
    weights = numbers(torch.float64, B) + 2
    size = flat(want).norm() * 10 + 10
    mean = torch.tensordot(weights.to(want.dtype), want, 1)
    assert_near(factor.weighted_sum(weights, space), mean, size, rtol)
    if (sides := factor.sides_of_sum(weights)) is not None:
        assert_near((sides[0].t() @ sides[1]).view(mean.shape), mean, size, rtol)
    direction = numbers(factor.dtype, *want.shape[1:])
    products, sum_beside = factor.dot_and_sum(direction, weights, space)
    assert_near(products, flat(want) @ flat(direction.unsqueeze(0)).squeeze(0), size * (1 + direction.norm()), rtol)
    assert_near(sum_beside, mean, size, rtol)
    assert_near(bounded_sum(factor, weights, space), mean, size, rtol)
    assert_near(factor.sum_squares(None, space), want.abs().square().sum(0), size**2, rtol)
    squares = (want - want.sum(0) / max(B, 1)).abs().square().sum(0)  # around the mean, whatever the center
    assert_near(factor.sum_squares(center, space), squares, size**2 + flat(center[None]).norm() ** 2 * (B + 1), rtol)


def precision(factor: Factor) -> float:
    return max(1e-11, 16 * torch.finfo(factor.dtype).eps)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("B", [3, 1, 0])
@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_every_question(name: str, dtype: torch.dtype, B: int, space: str) -> None:
    factor, want = FACTORS[name](B, dtype)
    check(factor, want, SPACES[space](), precision(factor))


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_some_of_the_samples(name: str, dtype: torch.dtype) -> None:
    """Ranges and indices in any order; then all questions again, as nothing of the whole may be remembered."""
    factor, want = FACTORS[name](5, dtype)
    factor.norms()
    for some in (slice(1, 4), slice(0, 0), slice(4, 5), torch.tensor([4, 0, 3]), torch.tensor([], dtype=torch.long)):
        check(factor[some], want[some], rtol=precision(factor))
    twice = factor[1:5][torch.tensor([2, 0])]
    check(twice, want[[3, 1]], rtol=precision(factor))


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_ranges_of_elements(name: str, dtype: torch.dtype) -> None:
    factor, want = FACTORS[name](3, dtype)
    n = flat(want).shape[1]
    for start, stop in {(0, n), (0, 1), (n - 1, n), (n // 3, n // 2 + 1), (3, 5)}:
        got = factor.elements(start, stop) if 0 <= start < stop <= n else None
        if got is not None:
            assert_near(got, flat(want)[:, start:stop], 1 + flat(want).norm(), precision(factor))


ALIKE = [
    name for name, make in FACTORS.items() if (f := make(1, torch.float64)[0]).shape == SHAPE and not f.dtype.is_complex
]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", ALIKE)
def test_inner_products_with_every_other_kind(name: str, space: str) -> None:
    """Two batches of one model need not have factors of the same form."""
    factor, mine = FACTORS[name](3, torch.float64)
    for other in ALIKE:
        against, theirs = FACTORS[other](2, torch.float64)
        size = torch.outer(flat(mine).norm(dim=1), flat(theirs).norm(dim=1)) + 1e-3
        got = factor.gram(against, SPACES[space]())
        assert_near(got, flat(mine) @ flat(theirs).t(), size, max(precision(factor), precision(against)))


PATHS = {
    False: "outer-T0 outer-T1 outer-T2 outer-gram outer-gram-blocks outer-groups-gram sum-tied sum-tied-rows-first "
    "rows-T20 masked dense convolution-gram-plain-R1 convolution-gram-plain-R2 convolution-gram-groups-R1 "
    "convolution-gram-transposed-groups-R1",
    True: "outer-T40 outer-groups-T40 sum-tied-many sum-masked convolution-2d-pad-R1 convolution-2d-pad-R2 "
    "convolution-2d-groups-stride-R1 convolution-2d-transposed-stride-R2 convolution-2d-depthwise-R1",
}


@pytest.mark.parametrize(("written", "name"), [(w, name) for w, names in PATHS.items() for name in names.split()])
def test_both_ways_to_norms_are_taken(written: bool, name: str) -> None:
    """The tests above are worth little if all factors go one way: on every CPU, they choose by the costs of one."""
    factor, _ = FACTORS[name](2, torch.float64)
    assert factor.prefers_stack(reused=False) == written
    written_out = Factor._compute_norms(factor, Workspace())
    assert_near(factor.norms(), written_out, 1 + written_out, 1e-12)


def test_a_sum_leaves_its_terms_alone() -> None:
    value = numbers(torch.float64, 3, 6, 4)
    before, terms = (
        value.clone(),
        [Dense(value), Outer(numbers(torch.float64, 3, 2, 6), numbers(torch.float64, 3, 2, 4))],
    )
    both = Sum(terms)
    assert torch.equal(both.stack(), both.stack())
    both.weighted_sum(torch.ones(3)), both.norms(), both.dot(value), both.gram(both)
    assert torch.equal(value, before)


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("B", [0, 1, 3])
def test_back_is_the_adjoint(name: str, B: int) -> None:
    move, base, shape, forward = MOVES[name]
    inner, result = getattr(move, "base", None), getattr(move, "dtype", torch.float64)
    g = numbers(inner if isinstance(inner, torch.dtype) else torch.float64, B, *base)
    v = numbers(result, 2, *shape)
    moved, back = move(g), move.adjoint(v)
    assert (moved.shape, moved.dtype, back.shape) == ((B, *shape), result, (2, *base))
    eps = 32 * max(torch.finfo(t.dtype).eps for t in (g, v))
    assert_near(
        flat(moved) @ flat(v).t(), flat(g) @ flat(back.to(g.dtype)).t(), 1 + flat(g).norm() * flat(v).norm(), eps
    )
    for given_, seen in zip(v, back, strict=True):
        assert_near(seen.to(g.dtype), forward(given_).to(g.dtype), 10, eps)
    if move.is_lossless and B:
        assert_near(flat(moved).norm(dim=1), flat(g).norm(dim=1), flat(g).norm(), eps)


@pytest.mark.parametrize("base", [torch.float32, torch.float64, torch.complex64])
def test_views_of_other_dtypes(base: torch.dtype) -> None:
    """A cast's gradients are asked in the cast's dtype, a real parameter's are the real parts."""
    for target in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        for make in (dense(), outer(1), outer(3, (30, 20)), rows(20), total(outer(2), dense())):
            factor, want = make(3, base)
            want = want if target.is_complex else want.real if want.is_complex() else want
            want = want.to(torch.complex128) if target.is_complex else want
            check(
                View(factor, factor.shape, Cast(base, target)),
                want,
                rtol=16 * max(torch.finfo(d).eps for d in (base, target)),
            )


@settings(CHECKED, max_examples=100)
@given(st.integers(0, 2**20), st.integers(0, 4), st.lists(st.tuples(*[st.integers(0, 9)] * 2), min_size=1, max_size=4))
def test_sums_of_anything(seed: int, B: int, kinds: list[tuple[int, int]]) -> None:
    """Outer products, rows, masks and dense terms of one shape, with any numbers of positions, combined."""
    rng = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    made = []
    for kind, T in kinds:
        if kind < 4:
            made.append(outer_of(random(B, T, 7), random(B, T, 5), 1.0 if kind else -2.0))
        elif kind < 7:
            made.append(rows_of(torch.randint(-1, 7, (B, T), generator=rng), random(B, T, 5), 7))
        else:
            value = random(B, 7, 5)
            made.append((Dense(value), value))
    factor, want = combine([f for f, _ in made]), sum(w for _, w in made)
    check(factor, want, rtol=1e-11)
    order = torch.randperm(B, generator=rng)[: B // 2 + 1]
    check(factor[order], want[order], Workspace(100), rtol=1e-11)


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("positions", [1, 2, 40])
def test_sides_of_a_sum_where_they_are_smaller(batch: int, positions: int) -> None:
    left, right = numbers(torch.float64, batch, positions, 30), numbers(torch.float64, positions, batch, 20)
    factor = Outer(left, right.transpose(0, 1), scale=0.5)
    assert (factor.sides_of_sum(torch.ones(batch)) is not None) == (batch * positions < 12)
    check(factor, torch.einsum("btp,tbd->bpd", left, right) / 2)
