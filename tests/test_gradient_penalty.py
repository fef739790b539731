"""Losses that hold gradients themselves (``create_graph=True``): exact through every kind of layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from tests.reference import assert_same, definition

B = 3


def between(*layers: nn.Module) -> Callable[[], nn.Module]:
    """Layers that see images of four channels, with parameters before and after."""
    return lambda: nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), *layers, nn.Conv1d(4, 4, 1))


class Computed(nn.Module):
    """A function of a linear layer's outputs."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(5, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class Unrolled(nn.Module):
    """Two steps of a cell, or a layer of them."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.cell, nn.RNNBase):
            found: Tensor = self.cell(x)[0]
            return found
        state = self.cell(x[:, 0])
        state = self.cell(x[:, 1], state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


NORMS = {
    "layer": between(nn.LayerNorm(5)),
    "layer, two dims": between(nn.LayerNorm((4, 5))),
    "layer, no scale": between(nn.LayerNorm(5, elementwise_affine=False)),
    "rms": between(nn.RMSNorm(5)),
    "group": between(nn.GroupNorm(2, 4)),
    "group, first": lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 1)),
    "group, alone": lambda: nn.GroupNorm(2, 4),
    "group, one channel each": between(nn.GroupNorm(4, 4)),
    "group, no scale": between(nn.GroupNorm(2, 4, affine=False)),
    "instance": between(nn.InstanceNorm1d(4, affine=True)),
    "instance, no scale": between(nn.InstanceNorm1d(4)),
    "batch, eval": lambda: between(nn.BatchNorm1d(4))().eval(),
    "local response": between(nn.LocalResponseNorm(2)),
}
LAYERS = {
    "conv": lambda: nn.Sequential(nn.Conv1d(4, 4, 3, stride=2, padding=1), nn.Tanh()),
    "conv, groups": lambda: nn.Sequential(nn.Conv1d(4, 4, 3, groups=2), nn.Tanh()),
    "conv, depthwise": lambda: nn.Sequential(nn.Conv1d(4, 4, 3, groups=4), nn.Tanh()),
    "conv, transposed": lambda: nn.Sequential(nn.ConvTranspose1d(4, 4, 3), nn.Tanh()),
    "lstm cell": lambda: Unrolled(nn.LSTMCell(5, 3)),
    "gru cell": lambda: Unrolled(nn.GRUCell(5, 3)),
    "lstm": lambda: Unrolled(nn.LSTM(5, 3, batch_first=True)),
    "gru": lambda: Unrolled(nn.GRU(5, 3, batch_first=True)),
    "prelu": between(nn.PReLU(4)),
    "gelu": between(nn.GELU()),
    "softmax": lambda: Computed(lambda z: z.softmax(-1)),
    "log_softmax": lambda: Computed(lambda z: z.log_softmax(-1)),
    "std and mean": lambda: Computed(lambda z: torch.cat(torch.std_mean(z, -1), 1)),
    "min and max": lambda: Computed(lambda z: torch.cat(torch.aminmax(z, dim=-1), 1)),
    "sort": lambda: Computed(lambda z: z.sort(-1)[0] * torch.arange(4)),
    "cross entropy": lambda: Computed(lambda z: F.cross_entropy(z.mT, torch.arange(4).expand(B, 4), reduction="none")),
    "normalize": lambda: Computed(lambda z: F.normalize(z, dim=-1)),
    "eigenvalues": lambda: Computed(lambda z: torch.linalg.eigh(z @ z.mT)[0]),
    "qr": lambda: Computed(lambda z: torch.cat(torch.linalg.qr(z.mT @ z + torch.eye(4)), 1)),
}
CASES = NORMS | LAYERS


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """The norm of the gradient with respect to the inputs, and of the outputs."""
    x = x.clone().requires_grad_()
    out = model(x)
    (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return g.flatten(1).norm(dim=1) + out.flatten(1).square().sum(1)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("case", CASES)
def test_gradient_penalties_are_exact(case: str, x: Tensor) -> None:
    torch.manual_seed(1)
    model = CASES[case]().double()
    losses = penalty(model, x)
    want = definition(losses, model)
    assert_same(ps.grad(losses, model, retain_graph=True), want, rtol=1e-7)
    ps.norms(losses, model, independent=True)


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("results", [(0,), (1,), (2,), (1, 2), (0, 1), (0, 1, 2)])
def test_any_of_the_results_of_a_group_norm(results: tuple[int, ...], x: Tensor) -> None:
    """Mean and deviation are results, too: alone, they leave the scale and the shift without gradients."""
    w, scale, shift = (torch.rand(n, dtype=torch.float64).requires_grad_() for n in ((4, 4, 1), (4,), (4,)))
    found = torch.native_group_norm(F.conv1d(x, w), scale, shift, B, 4, 5, 2, 1e-5)
    losses = sum(found[nr].reshape(B, -1).square().sum(1) for nr in results)
    want = definition(losses, [w, scale, shift])
    assert_same(ps.grad(losses, [w, scale, shift], retain_graph=True), want)


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
def test_samples_that_meet_in_one_of_several_results(x: Tensor) -> None:
    """What the other results show is not hidden by the first."""
    w = torch.rand(5, 4, dtype=torch.float64, requires_grad=True)
    deviation, mean = torch.std_mean(x @ w, (1, 2))
    losses = deviation + mean.flip(0)
    assert_same(ps.grad(losses, [w], retain_graph=True), definition(losses, [w]))
    with pytest.raises(ps.InteractionError, match="interact"):
        ps.grad(losses, [w], independent=True)


def test_a_batch_norm_in_training_mode_is_refused(x: Tensor) -> None:
    model = between(nn.BatchNorm1d(4))().double()
    losses = penalty(model, x)
    with pytest.raises(ps.InteractionError, match="interact"):
        ps.norms(losses, model, independent=True)
