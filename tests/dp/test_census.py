"""The parameters of a model by name: found again when anything about them has changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from persample.dp.census import Census


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.LayerNorm(3))


def _replaced(m: nn.Sequential) -> None:
    m[0].weight = nn.Parameter(torch.ones(3, 2))


def _added(m: nn.Sequential) -> None:
    m.register_parameter("extra", nn.Parameter(torch.ones(1)))


def _removed(m: nn.Sequential) -> None:
    del m[0].bias


def _another_module(m: nn.Sequential) -> None:
    m[1][0] = nn.Linear(3, 3)


def _one_more(m: nn.Sequential) -> None:
    m.append(nn.Linear(3, 1))


def _tied(m: nn.Sequential) -> None:
    m[1][0].bias = m[0].bias


def _exchanged(m: nn.Sequential) -> None:
    m[0], m[2] = m[2], m[0]


def _renamed(m: nn.Sequential) -> None:
    m[1].add_module("other", m[1][0])
    del m[1][0]


CHANGES = [_replaced, _added, _removed, _another_module, _one_more, _tied, _exchanged, _renamed]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: Callable[[nn.Sequential], None]) -> None:
    made = model()
    census = Census(made)
    census.named()
    change(made)
    found, want = census.named(), dict(made.named_parameters())
    assert list(found) == list(want)
    assert all(found[name] is want[name] for name in want)


def test_nothing_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    census = Census(model())
    first = census.named()
    monkeypatch.setattr(nn.Module, "_named_members", None)
    assert dict(census.named()) == dict(first)


def test_modules_with_their_own_names() -> None:
    class Own(nn.Linear):
        def named_parameters(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def, override]
            yield "mine", self.weight

    assert list(Census(Own(2, 2)).named()) == ["mine"]
