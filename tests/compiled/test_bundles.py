"""Which small layers are computed together in a graph: chosen by the batch size of the first call, for all sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample import dp
from tests.reference import assert_same


def images(channels: int = 8, size: int = 8) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Four convolutions that are alike, with 512 numbers of one sample in each cotangent."""
    layers = [m for _ in range(4) for m in (nn.Conv2d(channels, channels, 3, padding=1), nn.Tanh())]
    return nn.Sequential(*layers), lambda B: torch.randn(B, channels, size, size)


class Held:
    """A backend that runs graphs as they are, and counts the calls of an op in each of them."""

    def __init__(self, op: str) -> None:
        self.op, self.counts = op, list[int]()

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        self.counts.append(sum(self.op in str(node.target) for node in graph.graph.nodes))
        return graph


@pytest.mark.parametrize(("first", "ops"), [(16, 2), (128, 2), (129, 4), (300, 4)])
def test_large_layers_are_left_where_they_are(first: int, ops: int) -> None:
    """Three of the four are passed by the engine; the first one, at which it ends, is on its own."""
    model, draw = images()
    held = Held("convolution_norms")
    step = ps.compile(lambda x: model(x).square().sum((1, 2, 3)), model, ps.Norms(), backend=held, verbose=False)
    step(draw(first))
    assert held.counts[-1] == ops


def test_one_choice_serves_all_batch_sizes() -> None:
    model, draw = images()
    held = Held("convolution_norms")

    def losses(x: Tensor) -> Tensor:
        return model(x).square().sum((1, 2, 3))

    step = ps.compile(losses, model, ps.Norms(), ps.Stack(), backend=held, dynamic=True, verbose=False)
    for B in (100, 100, 150, 150, 20, 20, 200):
        x = draw(B)
        norms, stacks = step(x)
        assert_same(stacks, ps.grad(losses(x), model), 1e-4)
        assert torch.allclose(norms, ps.norms(losses(x), model), rtol=1e-4)
    assert len(step.builds) == 1


def test_private_steps_choose_by_the_plan() -> None:
    """And not by what was drawn, on which no sample's rounding may depend."""
    model, draw = images()
    held = Held("convolution_stack")
    plan = dp.Plan(examples=200, batch_size=129, steps=2, noise_multiplier=1.0, delta=1e-3, accountant="rdp")
    private = dp.Private(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        plan,
        compile=lambda x: model(x).square().sum((1, 2, 3)),
        backend=held,
    )
    for (x,) in private.batches(torch.utils.data.TensorDataset(draw(200)), physical_batch_size=60):
        private.step(x)
    assert set(held.counts) == {4}
