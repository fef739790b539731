"""Inner products of the gradients of tables, by the rows that samples have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from persample.factors import Outer, Rows, Sum, Workspace
from persample.factors.stacks import real_rows
from persample.factors.tied import tied_gram

V = 40
IDS: dict[str, Callable[[int, int], Tensor]] = {
    "any": lambda B, T: torch.randint(V, (B, T)),
    "the same": lambda B, T: torch.full((B, T), 7),
    "a few often": lambda B, T: (torch.rand(B, T).pow(6) * V).long(),
    "some skipped": lambda B, T: torch.randint(-1, V, (B, T)).clamp(max=3),
    "all skipped": lambda B, T: torch.full((B, T), -1),
    "own": lambda B, T: torch.arange(B).unsqueeze(1).expand(B, T) % V,
}


def rows(kind: str, B: int, T: int, row: tuple[int, ...] = (3,), dtype: torch.dtype = torch.float64) -> Rows:
    return Rows(IDS[kind](B, T), torch.randn(B, T, *row, dtype=dtype), V)


def products(a: Rows | Sum, b: Rows | Sum) -> Tensor:
    return real_rows(a.stack()) @ real_rows(b.stack()).t()


@pytest.mark.parametrize("limit", [0, 300, None])
@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize("other", [None, *IDS])
def test_rows(kind: str, other: str | None, limit: int | None) -> None:
    torch.manual_seed(0)
    a = rows(kind, 9, 5)
    b = a if other is None else rows(other, 4, 7)
    torch.testing.assert_close(a.gram(b, Workspace(limit)), products(a, b))


@pytest.mark.parametrize(("B", "T"), [(0, 3), (3, 0), (1, 1), (V, 2)])
def test_sizes(B: int, T: int) -> None:
    a, b = rows("any", B, T), rows("any", 2, 3)
    for pair in ((a, a), (a, b), (b, a)):
        torch.testing.assert_close(pair[0].gram(pair[1]), products(*pair))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("row", [(), (4,), (2, 3)])
def test_rows_of_any_form(row: tuple[int, ...], dtype: torch.dtype) -> None:
    a = rows("a few often", 6, 5, row, dtype)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(a.gram(a), products(a, a), rtol=tolerance, atol=tolerance)


def test_terms_that_cancel_within_a_row() -> None:
    """They are added up before they are multiplied."""
    dy = torch.tensor([1e6, -1e6, 1.0]).reshape(1, 3, 1)
    a = Rows(torch.zeros(1, 3, dtype=torch.long), dy, V)
    assert float(a.gram(a)) == 1


def tied(B: int, T: int, positions: int = 1) -> Sum:
    outer = Outer(torch.randn(B, positions, V).double(), torch.randn(B, positions, 3).double(), 0.5)
    return Sum([outer, rows("some skipped", B, T)])


@pytest.mark.parametrize("limit", [0, None])
@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
def test_tied(turned: bool, positions: int, limit: int | None) -> None:
    torch.manual_seed(0)
    a, b = tied(5, 4, positions), tied(3, 6, positions)
    if turned:
        a = Sum(a.terms[::-1])
    for pair in ((a, a), (a, b)):
        torch.testing.assert_close(pair[0].gram(pair[1], Workspace(limit)), products(*pair))


def test_tied_terms_that_cancel() -> None:
    """Where the sum is much smaller than both of its terms, it is written out."""
    outer = Outer(torch.zeros(2, 1, V).index_fill(2, torch.tensor([3]), 1e4), torch.ones(2, 1, 3))
    table = Rows(torch.full((2, 1), 3), torch.full((2, 1, 3), -1e4 + 0.5), V)
    terms = outer, table
    assert tied_gram(terms, terms, Workspace()) is None
    torch.testing.assert_close(Sum(terms).gram(Sum(terms)), torch.full((2, 2), 0.75), rtol=1e-3, atol=0)
