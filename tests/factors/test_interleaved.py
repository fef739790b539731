"""Several factors as one: sample b of part k is sample b·K + k, whatever the parts are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from persample.factors import Dense, Factor, Interleaved, Outer, Rows, View, Workspace, interleave
from persample.factors.interleaved import SharedSide
from tests.factors import FACTORS, numbers
from tests.factors.test_algebra import EVERY, SPACES, assert_near, check, precision
from tests.reference import flat

K = 3


def parts_of(name: str, B: int, dtype: torch.dtype) -> tuple[list[Factor], Tensor]:
    """K factors of B samples each, and the gradients of all in the order (b, k)."""
    whole, want = FACTORS[name](K * B, dtype)
    return [whole[k * B : (k + 1) * B] for k in range(K)], want.unflatten(0, (K, B)).transpose(0, 1).flatten(0, 1)


def shared(B: int, T: int, *, swapped: bool = False, scale: float = 1.0) -> tuple[list[Factor], Tensor]:
    """Outer products with one side in common."""
    each, other = numbers(torch.float64, K, B, T, 4), numbers(torch.float64, B, T, 3)
    parts: list[Factor] = [Outer(other, one, scale) if swapped else Outer(one, other, scale) for one in each]
    return parts, torch.stack([part.stack() for part in parts], 1).flatten(0, 1)


@pytest.mark.parametrize("space", ["plenty", pytest.param("tiny", marks=pytest.mark.slow)])
@pytest.mark.parametrize("B", [2, 0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_every_question(name: str, dtype: torch.dtype, B: int, space: str) -> None:
    parts, want = parts_of(name, B, dtype)
    for joined in (interleave(parts), Interleaved.of(dict(enumerate(parts)), K)):
        check(joined, want, SPACES[space](), precision(joined))


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("B", "T"), [(2, 1), (2, 5), (1, 1), (0, 1), (2, 40)])
def test_a_side_in_common(B: int, T: int, swapped: bool, space: str) -> None:
    parts, want = shared(B, T, swapped=swapped, scale=-0.5)
    joined = interleave(parts)
    base = joined.base if isinstance(joined, View) else joined
    assert isinstance(base, SharedSide)
    assert base.shared.data_ptr() == parts[0].tensors[0 if swapped else 1].data_ptr()
    check(joined, want, SPACES[space]())
    others, theirs = shared(2, 1, swapped=swapped)
    size = (flat(want).norm() + 1) * (flat(theirs).norm() + 1)
    assert_near(joined.gram(interleave(others)), flat(want) @ flat(theirs).t(), size)
    assert_near(joined.gram(others[0]), flat(want) @ flat(others[0].stack()).t(), size)


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_some_of_the_samples(name: str, dtype: torch.dtype) -> None:
    parts, want = parts_of(name, 3, dtype)
    for joined in (interleave(parts), Interleaved.of(dict(enumerate(parts)), K)):
        joined.norms()
        for some in (slice(1, 6), slice(4, 4), torch.tensor([7, 0, 4]), torch.empty(0, dtype=torch.long)):
            check(joined[some], want[some], rtol=precision(joined))
        check(joined[1:8][torch.tensor([4, 0])], want[[5, 1]], rtol=precision(joined))


def test_positions_that_have_nothing() -> None:
    """Their gradients are zeros."""
    parts, want = parts_of("dense", 3, torch.float64)
    want.view(3, K, *want.shape[1:])[:, 1] = 0
    joined = Interleaved.of({0: parts[0], 2: parts[2]}, K)
    check(joined, want)
    check(joined[torch.tensor([1, 4, 3])], want[[1, 4, 3]])


def test_forms_that_are_kept() -> None:
    dense = [Dense(numbers(torch.float64, 2, 3)) for _ in range(K)]
    assert isinstance(interleave(dense), Dense)
    ids = torch.randint(5, (2, 4))
    assert isinstance(interleave([Rows(ids, numbers(torch.float64, 2, 4, 3), 5) for _ in range(K)]), Rows)
    assert interleave(dense[:1]) is dense[0]


def test_other_scales_and_shapes_are_not_taken_for_equal() -> None:
    parts, _ = shared(2, 1)
    other = Outer(*parts[1].tensors, scale=2.0)
    want = torch.stack([parts[0].stack(), other.stack()], 1).flatten(0, 1)
    check(interleave([parts[0], other]), want)
    long = [Outer(numbers(torch.float64, 2, T, 4), numbers(torch.float64, 2, T, 3)) for T in (2, 3)]
    check(interleave(long), torch.stack([part.stack() for part in long], 1).flatten(0, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_elements_too_large_for_their_dtype(dtype: torch.dtype) -> None:
    """Norms are infinite where a gradient that is written out is, and nowhere else."""
    large = torch.finfo(dtype).max ** 0.6
    right = torch.ones(2, 1, 3, dtype=dtype)
    right[1] = large
    parts = [Outer(torch.full((2, 1, 4), size, dtype=dtype), right) for size in (1.0, large)]
    joined = interleave(parts)
    assert isinstance(joined, SharedSide)
    written = torch.stack([part.stack() for part in parts], 1).flatten(0, 1)
    infinite = written.isinf().flatten(1).any(1)
    assert joined.norms(Workspace()).isinf().tolist() == infinite.tolist() == [False, False, False, True]
