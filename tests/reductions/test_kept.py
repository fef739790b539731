"""Tensors that are kept from call to call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import persample as ps
from persample.reductions import projection
from persample.reductions.kept import Kept
from tests.models import mlp


def maker(size: int, made: list[int]) -> Callable[[], Tensor]:
    def make() -> Tensor:
        made.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    return make


def test_what_is_kept_is_made_once() -> None:
    kept, made = Kept(100), list[int]()
    assert kept.get("a", 1, maker(60, made)) is kept.get("a", 1, maker(60, made))
    assert made == [60]


def test_others_make_room_and_an_owner_does_not_for_itself() -> None:
    kept, made = Kept(100), list[int]()
    kept.get("a", 1, maker(60, made))
    kept.get("b", 1, maker(60, made))  # in place of that
    kept.get("b", 2, maker(50, made))  # which is too much
    kept.get("b", 1, maker(60, made))
    assert made == [60, 60, 50]
    assert kept.nbytes == 60
    kept.get("c", 1, maker(101, made))
    assert kept.nbytes <= 100


@pytest.mark.parametrize("kind", ["rademacher", "kronecker"])
def test_projections_that_are_equal_share_their_matrices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    projection.KEPT.clear()
    made: list[str] = []
    random = ps.Projection._random

    def noting(self: ps.Projection, what: str, rows: int, columns: int) -> Tensor:
        made.append(what)
        return random(self, what, rows, columns)

    monkeypatch.setattr(ps.Projection, "_random", noting)
    model, x = mlp(), torch.randn(5, 3, dtype=torch.float64)
    first = ps.project(model(x).square().sum(1), model, ps.Projection(6, 1, kind))
    count = len(made)
    again = ps.project(model(x).square().sum(1), model, ps.Projection(6, 1, kind))
    assert torch.equal(first, again)
    assert count == len(made) > 0
    ps.project(model(x).square().sum(1), model, ps.Projection(6, 2, kind))
    assert len(made) == 2 * count
