"""Private training on compiled steps: the same accounts, checks and, up to rounding, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import persample as ps
from persample import dp
from tests.dp.helpers import CLASSES, EXAMPLES, WIDTH, dataset, losses_of, network, plan, private

CLIPS = {
    "flat": ps.ClippedSum(0.3),
    "automatic": ps.ClippedSum(0.3, gamma=0.01),
    "per parameter": ps.ClippedSum(0.2, per="parameter"),
    "groups": ps.ClippedSum([0.2, 0.4], per=[["0.weight", "0.bias"], ["2.weight", "2.bias"]]),
    "adaptive": dp.AdaptiveClip(initial=0.3, quantile=0.7, rate=2.0),
}


def compiled(model: nn.Module, *, backend: Any = "aot_eager", **more: Any) -> dp.Private:
    return private(model, compile=lambda x, y: losses_of(model, (x, y)), backend=backend, **more)


def gradients(run: dp.Private, model: nn.Module, batch: Any, *, whole: bool) -> tuple[dict[str, Tensor], dp.Step]:
    record = run.backward(*batch) if whole else run.backward(losses_of(model, batch))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, record


def assert_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    for name, want in theirs.items():
        torch.testing.assert_close(ours[name], want, rtol=0, atol=1e-5 * bound)


@pytest.mark.parametrize("name", CLIPS)
def test_steps_are_those_of_the_eager_engine(name: str) -> None:
    models = network(), network()
    plain, fast = private(models[0], clip=CLIPS[name]), compiled(models[1], clip=CLIPS[name])
    sizes = set()
    for batch, same in zip(plain.batches(dataset()), fast.batches(dataset()), strict=True):
        (want, record), (got, other) = (
            gradients(run, model, b, whole=whole)
            for run, model, b, whole in ((plain, models[0], batch, False), (fast, models[1], same, True))
        )
        assert record == other
        assert_alike(got, want, 0.3)
        sizes.add(record.size)
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert len(sizes) > 2
    assert plain.spent() == fast.spent()
    assert plain.bound == pytest.approx(fast.bound) if plain.bound else fast.bound is None
    assert fast._compiled is not None and fast._compiled.refused is None
    assert len(fast._compiled.builds) == 1 and fast._compiled.doubts == 0
