"""Where modules keep what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from persample.modules import attributes_of, held_by, is_usual


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda m: setattr(m[0], "extra", nn.Parameter(torch.ones(2))),
        lambda m: setattr(m[0], "bias", None),
        lambda m: m.append(nn.ReLU()),
        lambda m: m.__setitem__(1, nn.Tanh()),
        lambda m: m.pop(1),
    ],
)
def test_what_a_model_holds(change: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    modules = list(model.modules())
    before = held_by(modules)
    model.train(False)
    model[0].weight.data.mul_(2)
    assert held_by(modules) == before
    change(model)
    assert held_by(modules) != before


def test_usual_modules() -> None:
    class Own(nn.Module):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return iter(())

    assert is_usual(nn.Linear(1, 1))
    assert not is_usual(Own())


def test_attributes() -> None:
    norm = nn.BatchNorm1d(2)
    norm.inner = nn.ReLU()
    assert {"weight", "running_mean", "inner", "eps"} <= attributes_of(norm)
    assert attributes_of(3.0) == set()
