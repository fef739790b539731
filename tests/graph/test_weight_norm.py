"""Weight norm with any of its parts trainable or requested."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

import persample as ps
from tests.reference import assert_same, definition, vectors

Wrap = Callable[[nn.Module, int | None], nn.Module]


def old(module: nn.Module, dim: int | None) -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return weight_norm(module, dim=dim)


def new(module: nn.Module, dim: int | None) -> nn.Module:
    found: nn.Module = parametrizations.weight_norm(module, dim=dim)
    return found


WRAPS = pytest.mark.parametrize("wrap", [old, new])
DIMS = pytest.mark.parametrize("dim", [0, 1, -1, None])
LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "conv": (lambda: nn.Conv1d(4, 3, 2), (5, 4, 6)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 3, 2), (5, 4, 6)),
}


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


@WRAPS
@DIMS
@pytest.mark.parametrize("layer", LAYERS)
def test_every_part_trainable_or_frozen_requested_or_not(layer: str, wrap: Wrap, dim: int | None) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[layer]
    model, x = wrap(make(), dim).double(), torch.randn(shape, dtype=torch.float64)
    parts = dict(model.named_parameters())
    for count in (1, 2, 3):
        for trainable in combinations(parts, count):
            for name, p in parts.items():
                p.requires_grad_(name in trainable)
            for asked in (trainable, trainable[:1], trainable[-1:]):
                params = {name: parts[name] for name in asked}
                found = losses(model, x)
                want = definition(found, params)
                assert_same(ps.grad(found, params, retain_graph=True), want)
                assert_same([ps.norms(found, params)], {"0": vectors(want).norm(dim=1)})


@WRAPS
@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_is_tied(wrap: Wrap, part: int) -> None:
    """Contributions from elsewhere still come together with those through the norm."""
    torch.manual_seed(0)
    model, x = wrap(nn.Linear(4, 4), 0).double(), torch.randn(5, 4, dtype=torch.float64)
    p = [p for name, p in model.named_parameters() if name != "bias"][part]
    found = losses(model, x) + (x @ p.expand(4, 4)).sum(1)
    assert_same(ps.grad(found, [p], retain_graph=True), definition(found, [p]))
