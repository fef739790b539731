"""Whole steps of models with convolutions, traced into graphs and run by compilers on other data, against autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import persample as ps
from persample.kernels.certificates import traced

SAMPLES = 4
Model = Callable[[], nn.Module]


class Frames(nn.Module):
    """Two images for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.stack([x, x.flip(-1)], 1).flatten(0, 1)).unflatten(0, (-1, 2)).square().mean((1, 3, 4))


class Twice(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.tanh(self.conv(x))).flatten(1)


class ThreeD(nn.Module):
    """Dims for volumes, and a sequence after them."""

    def __init__(self) -> None:
        super().__init__()
        self.volume, self.line = nn.Conv3d(1, 4, 2), nn.Conv1d(4, 6, 3, dilation=2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(torch.tanh(self.volume(x.unsqueeze(1))).flatten(2)).mean(2)


MODELS: dict[str, Model] = {
    "padding modes": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding="same", padding_mode="reflect"),
        nn.Flatten(),
    ),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose2d(3, 6, 3, stride=2, output_padding=1, groups=3), nn.Tanh(), nn.Conv2d(6, 2, 5), nn.Flatten()
    ),
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.Conv2d(16, 16, 3, groups=16),
        nn.Tanh(),
        nn.Conv2d(16, 8, 1),
        nn.AdaptiveAvgPool2d(2),  # of one pixel, in channels-last models, is an as_strided, which nobody can follow
        nn.Flatten(),
    ),
    "several images": Frames,
    "used twice": Twice,
    "3d and 1d": ThreeD,
}


def built(model: nn.Module, x: Tensor, backend: str) -> Callable[[Tensor], Sequence[Any]]:
    """Norms, a clipped sum and all gradients as one compiled graph of the weights and the input."""
    names = [name for name, _ in model.named_parameters()]

    def step(x: Tensor, *weights: Tensor) -> list[Tensor]:
        params = {n: w.detach().requires_grad_() for n, w in zip(names, weights, strict=True)}
        with torch.enable_grad(), traced() as certificates:
            losses = functional_call(model, params, (x,)).square().sum(1)
            norms, clipped, stack = ps.reduce(losses, params, ps.Norms(), ps.ClippedSum(0.5), ps.Stack())
        holds = [c.holds.all() for c in certificates]
        return [norms, *clipped.values(), *stack.values(), *holds]

    weights = [p.detach() for p in model.parameters()]
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x, *weights)
    options = {"layout_optimization": False} if backend == "inductor" else None
    compiled = torch.compile(graph, backend=backend, options=options)

    def run(x: Tensor) -> Sequence[Any]:
        with torch.no_grad():
            norms, *rest = compiled(x, *weights)
        n = len(names)
        assert all(bool(holds) for holds in rest[2 * n :])
        return norms, rest[:n], rest[n : 2 * n]

    return run


def check(make: Model, backend: str, dtype: torch.dtype, channels_last: bool = False) -> None:
    """The graph is traced with zeros, and run with numbers."""
    torch.manual_seed(0)
    model, x = make().to(dtype), torch.randn(SAMPLES, 3, 6, 7).to(dtype)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    norms, clipped, stack = built(model, torch.zeros_like(x), backend)(x)
    losses = model(x).square().sum(1)
    rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    expected = [torch.stack(each).double() for each in zip(*rows, strict=True)]
    totals = torch.cat([each.flatten(1) for each in expected], 1).norm(dim=1)
    rtol = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    close(norms, totals, rtol)
    weights = (0.5 / totals).clamp(max=1)
    for got, total, each in zip(stack, clipped, expected, strict=True):
        close(got, each, rtol)
        close(total, torch.einsum("b,b...->...", weights, each), rtol)


def close(got: Tensor, expected: Tensor, rtol: float) -> None:
    assert got.shape == expected.shape
    assert (got.double() - expected).norm() <= rtol * expected.norm()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_graphs(model: Model, backend: str, dtype: torch.dtype) -> None:
    check(model, backend, dtype)


@pytest.mark.parametrize("name", ["depthwise", "several images"])
def test_half_precision(name: str) -> None:
    check(MODELS[name], "aot_eager", torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_compiled(model: Model, dtype: torch.dtype, channels_last: bool) -> None:
    """Whatever strides a compiler gives to what the ops read."""
    if channels_last and model is ThreeD:
        pytest.skip("one format for models of images alone")
    check(model, "inductor", dtype, channels_last)
