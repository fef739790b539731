"""Cotangents that are taken as they are instead of being copied: only if nobody changes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample.graph.execute.watch import Gathering
from tests.graph.look_alikes import data, nothing_remembered  # noqa: F401
from tests.reference import assert_same, definition


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many cotangents every gathering copied."""
    seen: list[int] = []
    end = Gathering.end

    def noted(self: Gathering) -> dict[int, Tensor]:
        seen.append(len(self._copies))
        return end(self)

    monkeypatch.setattr(Gathering, "end", noted)
    return seen


def weights(count: int = 5) -> list[Tensor]:
    return [(data(4, 4, seed=seed) / 2).requires_grad_() for seed in range(1, count + 1)]


def chain(ws: list[Tensor]) -> Tensor:
    h = data(3, 4)
    for w in ws:
        h = (h @ w).tanh()
    return h.square().mean(1)


def test_only_the_first_backward_copies(copies: list[int]) -> None:
    ws = weights()
    for _ in range(3):
        losses = chain(ws)
        want = definition(losses, ws)
        assert_same(ps.grad(losses, ws), want)
    assert copies == [4, 0, 0]


def test_sums_that_the_engine_makes_in_place(copies: list[int]) -> None:
    """The output of the first norm goes two ways, and another one comes to it every time."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    for turn in range(4):
        losses = layer(data(4, 5, 4)).square().sum((1, 2))
        want = definition(losses, layer)
        assert_same(ps.grad(losses, layer, retain_graph=turn % 2 == 0), want)
    assert copies == [2, 0, 0, 0]


@pytest.mark.parametrize("from_turn", [0, 1, 3])
def test_a_hook_on_the_result_of_a_layer(from_turn: int) -> None:
    """What the layer gets is what the hook returns."""
    ws = weights()
    for turn in range(5):
        h = data(3, 4)
        for i, w in enumerate(ws):
            y = h @ w
            if turn >= from_turn:
                y.register_hook(lambda g, i=i: g * (i + 1))
            h = y.tanh()
        losses = h.square().mean(1)
        want = definition(losses, ws)
        assert_same(ps.grad(losses, ws), want)


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
