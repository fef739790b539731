"""The parameters of a model by name: found again when anything about them has changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from persample.modules import parameters_of


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
    parameters_of(made)
    change(made)
    found, want = parameters_of(made), dict(made.named_parameters())
    assert list(found) == list(want)
    assert all(found[name] is want[name] for name in want)


def test_nothing_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    first = parameters_of(made)
    monkeypatch.setattr(nn.Module, "_named_members", None)
    assert parameters_of(made) == first


def test_modules_with_their_own_names() -> None:
    class Own(nn.Linear):
        def named_parameters(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def, override]
            yield "mine", self.weight

    assert list(parameters_of(own := Own(2, 2))) == ["mine"]
    assert list(parameters_of(own)) == ["mine"]


def test_models_that_are_equal_and_not_the_same() -> None:
    class Equal(nn.Linear):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        def __hash__(self) -> int:
            return 0

    for made in (Equal(2, 2), Equal(2, 2)):
        assert parameters_of(made)["weight"] is made.weight


def test_nothing_is_kept_alive() -> None:
    made = model()
    parameters_of(made)
    gone = [weakref.ref(made), weakref.ref(made[0].weight)]
    made[0].weight = nn.Parameter(torch.ones(3, 2))
    assert gone[1]() is None
    del made
    gc.collect()
    assert gone[0]() is None


def test_a_parameter_in_the_place_of_another() -> None:
    """What is freed may be where the next one is made."""
    made = model()
    for _ in range(50):
        parameters_of(made)
        del made[0].weight
        made[0].weight = nn.Parameter(torch.ones(3, 2))
        assert parameters_of(made)["0.weight"] is made[0].weight
