"""Cotangents that the engine returns instead of having them copied: only if nobody changes them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample.graph.gather import Gathering
from tests.graph.look_alikes import data, nothing_remembered  # noqa: F401
from tests.reference import assert_same, definition


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of cotangents that were copied."""
    seen: list[int] = []
    arrive = Gathering._arrive

    def noted(self: Gathering, place: int, grads: Sequence[Tensor | None]) -> None:
        seen.append(place)
        arrive(self, place, grads)

    monkeypatch.setattr(Gathering, "_arrive", noted)
    return seen


def weights(count: int = 5) -> list[Tensor]:
    return [(data(4, 4, seed=seed) / 2).requires_grad_() for seed in range(1, count + 1)]


def chain(ws: list[Tensor]) -> Tensor:
    h = data(3, 4)
    for w in ws:
        h = (h @ w).tanh()
    return h.square().mean(1)


def test_only_the_first_backward_copies(copied: list[int]) -> None:
    ws = weights()
    for expected in (4, 0, 0):
        copied.clear()
        losses = chain(ws)
        want = definition(losses, ws)
        assert_same(ps.grad(losses, ws), want)
        assert len(copied) == expected


def test_sums_are_always_copied(copied: list[int]) -> None:
    """The engine may have made them in place, and then not the next time."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    for turn in range(4):
        copied.clear()
        losses = layer(data(4, 5, 4)).square().sum((1, 2))
        want = definition(losses, layer)
        assert_same(ps.grad(losses, layer, retain_graph=turn % 2 == 0), want)
        assert len(copied) == (1 if turn else 2)  # the first norm feeds the second half, and what goes past it


@pytest.mark.parametrize("from_turn", [0, 1, 3])
def test_a_hook_that_changes_cotangents_in_place(from_turn: int) -> None:
    """Seen from the first backward on, they are copied; those that change later are refused."""
    ws = weights()
    for turn in range(5):
        h = data(3, 4)
        for i, w in enumerate(ws):
            other = h * 1
            if i and turn >= from_turn:
                other.register_hook(lambda g: g.mul_(0.5))
            h = other + h.tanh() @ w  # one cotangent for both terms
        losses = h.square().mean(1)
        want = definition(losses, ws)
        if 0 < from_turn <= turn:
            with pytest.raises(ps.UnsupportedError, match="changed in place during the backward"):
                ps.grad(losses, ws)
        else:
            assert_same(ps.grad(losses, ws), want)
