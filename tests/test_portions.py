"""Weights computed by ops that keep no structure: gradients are written out for a few samples at a time."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample.factors import Pulled
from persample.graph.execute import portions
from persample.reductions import exact
from persample.reductions.exact import ExactClippedSum
from tests.modes import megabytes
from tests.reference import assert_same, definition, vectors
from tests.test_computed_weights import LAYERS, compare, linear

P, D = 4, 6
Params = Mapping[str, Tensor]


class Straight(torch.autograd.Function):
    """Rounds, and hands cotangents on."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return (w * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 1.5


class Normalised(torch.autograd.Function):
    """A backward that is not linear: the sum of what it returns is not what it returns for the sum."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / grads[0].norm()


def newton_schulz(w: Tensor) -> Tensor:
    x = w / w.norm()
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ (x.t() @ x)
    return x


def svd(p: Params) -> Tensor:
    u, s, vh = torch.linalg.svd(p["w"], full_matrices=False)
    return u * s.sqrt() @ vh


def written_in_place(p: Params) -> Tensor:
    w = p["w"] * 1.0
    w[:2] = w[:2].tanh()
    return w


# All are (P, D).
WEIGHTS: dict[str, Callable[[Params], Tensor]] = {
    "tanh": lambda p: p["w"].tanh(),
    "chain": lambda p: p["w"].tanh().exp().sin() * 0.5,
    "softmax": lambda p: p["w"].softmax(0),
    "softmax of rows": lambda p: (p["w"] * 0.3).softmax(1),
    "cumsum": lambda p: p["w"].cumsum(0),
    "sort": lambda p: p["w"].sort(1).values,
    "svd": svd,
    "qr": lambda p: torch.linalg.qr(p["w"].t()).Q.t(),
    "matrix exp": lambda p: torch.linalg.matrix_exp(p["a"] - p["a"].t()) @ p["w"],
    "newton schulz": lambda p: newton_schulz(p["w"]),
    "fourier": lambda p: torch.fft.irfft(torch.fft.rfft(p["w"], dim=1).tanh(), n=D, dim=1),
    "transposed": lambda p: p["w"].t().tanh().t(),
    "reshaped": lambda p: p["w"].view(-1).softmax(0).view(P, D),
    "sliced": lambda p: torch.cat([p["w"][:, :2].tanh(), p["w"][:, 2:].sigmoid()], 1),
    "used itself, too": lambda p: p["w"].softmax(0) + p["w"],
    "two ways": lambda p: p["w"].softmax(0) * p["w"].cumsum(1),
    "twice itself": lambda p: p["w"].tanh() @ (p["w"].t() @ p["w"].sin()),
    "several": lambda p: p["m"] * p["w"].softmax(1) + p["c"].exp(),
    "columns": lambda p: p["w"] / p["w"].norm(dim=0),
    "custom": lambda p: Straight.apply(p["w"].tanh()),  # type: ignore[no-untyped-call]
    "not linear": lambda p: Normalised.apply(p["w"].tanh()),  # type: ignore[no-untyped-call]
    "in place": written_in_place,
    "checkpointed": lambda p: checkpoint(lambda w: w.tanh().softmax(1), p["w"], use_reentrant=False),
}
MEMORY = {"one sample": 1, "two samples": 1200, "more": 5000, "all": None}


def params() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"w": (P, D), "a": (P, P), "m": (P, 1), "c": (D,)}
    return {name: torch.randn(shape, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()}


def used_by(weight: Callable[[Params], Tensor], p: Params) -> dict[str, Tensor]:
    return {
        name: t for name, t in p.items() if torch.autograd.grad(weight(p).sum(), t, allow_unused=True)[0] is not None
    }


@pytest.fixture(autouse=True)
def _no_words(monkeypatch: pytest.MonkeyPatch) -> Any:
    """And portions of weights that are too small for it."""
    monkeypatch.setattr(portions, "_TINY", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ps.PerformanceWarning)
        yield


def check(weight: Callable[[Params], Tensor], layer: Callable[[Tensor, int, int], Tensor], memory: int | None) -> None:
    p = params()
    used = used_by(weight, p)
    torch.manual_seed(1)
    losses = layer(weight(p), 5, 3)
    want = definition(losses, used)
    flat, direction = vectors(want), {name: torch.randn_like(t) for name, t in used.items()}
    asked = ps.Stack(), ps.Norms(), ps.ClippedSum(0.3), ps.SecondMoment(), ps.Variance(), ps.Gram(), ps.Dot(direction)
    for reductions in [asked, *[(one,) for one in asked]]:
        torch.manual_seed(1)
        losses = layer(weight(p), 5, 3)
        for one, got in zip(reductions, ps.reduce(losses, used, *reductions, max_memory=memory), strict=True):
            compare(one, got, want, flat, direction)
    weights = torch.randn(5, dtype=torch.float64)
    torch.manual_seed(1)
    losses = layer(weight(p), 5, 3)
    (sums,) = ps.reduce(losses, used, ps.WeightedSum(weights), max_memory=memory)
    assert_same(sums, {name: torch.einsum("b,b...->...", weights, g) for name, g in want.items()})


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_definition(weight: str, memory: str) -> None:
    check(WEIGHTS[weight], linear, MEMORY[memory])


@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "linear"])
@pytest.mark.parametrize("weight", ["tanh", "softmax", "newton schulz", "several", "custom"])
def test_any_layer(weight: str, layer: str) -> None:
    check(WEIGHTS[weight], LAYERS[layer], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", ["softmax", "newton schulz", "used itself, too", "custom", "checkpointed"])
def test_other_dtypes(weight: str, dtype: torch.dtype) -> None:
    p = {name: t.detach().to(dtype).requires_grad_() for name, t in params().items()}
    used = used_by(WEIGHTS[weight], p)
    losses = linear(WEIGHTS[weight](p), 4, 3)
    want, weights = definition(losses, used), torch.randn(4)
    stacks, sums = ps.reduce(losses, used, ps.Stack(), ps.WeightedSum(weights), retain_graph=True, max_memory=1)
    rtol = 1e-4 if dtype == torch.float32 else 0.1
    assert_same(stacks, want, rtol)
    assert_same(
        sums, {name: torch.einsum("b,b...->...", weights, g.float()).to(dtype) for name, g in want.items()}, rtol
    )


@pytest.mark.parametrize("weight", ["softmax", "newton schulz", "not linear", "two ways"])
def test_another_batch(weight: str) -> None:
    """The factors of one graph are asked while another is gone through."""
    p, made = params(), WEIGHTS[weight]
    used = used_by(made, p)
    losses, other = linear(made(p), 3, 2), linear(made(p), 4, 2)
    want = vectors(definition(losses, used)) @ vectors(definition(other, used)).t()
    torch.testing.assert_close(ps.gram(losses, used, other=other, max_memory=1), want)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_sums_of_whole_numbers(weight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go through the ops twice, each sample alone, and add what was bounded."""
    monkeypatch.setattr(exact, "_MIN_KEPT", 0)
    p, made = params(), WEIGHTS[weight]
    used = used_by(made, p)
    losses = linear(made(p), 5, 3)
    want = definition(losses, used)
    clip = ps.ClippedSum(0.3)
    (sums,) = ps.reduce(losses, used, ExactClippedSum(clip, 16), max_memory=1)
    weights = clip.weigh(vectors(want).norm(dim=1))
    for name, g in want.items():
        total = sums.take(name)
        expected = torch.einsum("b,b...->...", weights, g)
        torch.testing.assert_close(total * sums.units[name].size, expected, rtol=1e-3, atol=1e-5)


def test_a_sample_that_cancels_is_not_summed_before_the_ops() -> None:
    """Its terms are a million times larger than their sum: added to those of others, their rounding would show."""
    torch.manual_seed(0)
    w = torch.randn(64, 64).requires_grad_()  # larger than what gradients are made of, or all would be kept
    x, y = torch.randn(3, 20, 64), torch.ones(3, 20, 64)
    x[1] = torch.randn(64)
    y[1, :-1] = torch.randn(19, 64) * 1e8
    y[1, -1] = 1 - y[1, :-1].double().sum(0)
    losses = ((x @ w.cumsum(0).t()) * y).sum((1, 2))
    want = definition(losses, {"w": w})["w"]
    norms = want.flatten(1).norm(dim=1)
    clipped = ps.clipped_sum(losses, {"w": w}, max_norm=1e-3, max_memory=1)["w"]
    assert float(norms[1]) > 0.1
    clipped_others = torch.einsum("b,b...->...", (1e-3 / norms[[0, 2]]).clamp(max=1), want[[0, 2]])
    assert float((clipped - clipped_others).norm()) < 1.01e-3


def test_samples_that_are_not_finite_are_alone_so() -> None:
    p = params()
    torch.manual_seed(1)
    x = torch.randn(4, D).double()
    x[2] = torch.nan
    losses = (x @ p["w"].softmax(1).t()).square().sum(1)
    clipped = ps.reduce(losses, {"w": p["w"]}, ps.ClippedSum(0.3, nonfinite="drop"), max_memory=1)[0]
    assert clipped.clipping.dropped == [2]
    kept = (x[[0, 1, 3]] @ p["w"].softmax(1).t()).square().sum(1)
    torch.testing.assert_close(clipped["w"], ps.clipped_sum(kept, {"w": p["w"]}, max_norm=0.3)["w"])


def test_an_op_is_called_once_however_many_ways_lead_to_it() -> None:
    """Fifteen diamonds, one below the other, are 2^15 ways."""
    w = torch.randn(P, D).double().requires_grad_()
    h = w
    for _ in range(15):
        h = (h.softmax(1) + h.cumsum(0)) / 4
    losses = linear(h, 3, 2)
    assert_same(ps.reduce(losses, [w], ps.Stack(), retain_graph=True, max_memory=1)[0], definition(losses, [w]), 1e-7)


# What is said of it.


def large(made: Callable[[Tensor], Tensor], size: int = 256) -> list[str]:
    w = torch.randn(size, size).requires_grad_()
    losses = (torch.randn(32, size) @ made(w)).square().sum(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ps.PerformanceWarning)
        ps.reduce(losses, {"w": w}, ps.Norms(), ps.ClippedSum(1.0), max_memory=2_000_000)
    return [str(one.message) for one in said]


def test_what_is_written_out_is_said_once() -> None:
    (message,) = large(lambda w: w.softmax(1).cumsum(0))
    assert "parameter 'w' is used through Softmax, Cumsum" in message
    assert "2 of 32 at a time" in message
    assert "max_memory" in message


def test_nothing_is_said_of_what_keeps_its_form_or_is_small() -> None:
    assert large(lambda w: w.tanh() * 0.5) == []
    assert large(lambda w: w.softmax(1).cumsum(0), 64) == []


MEMORY_OF = """
import sys, warnings, torch, persample as ps
warnings.simplefilter("ignore", ps.PerformanceWarning)
torch.set_num_threads(1)
w = torch.randn(1024, 1024).mul_(0.03).requires_grad_()
made = {"tanh": lambda w: w.tanh(), "softmax": lambda w: w.softmax(1)}[sys.argv[1]]

def step(count):
    losses = (torch.randn(count, 1024) @ made(w)).square().sum(1)
    if sys.argv[2] == "plain":
        losses.sum().backward()
    elif sys.argv[2] == "norms":
        ps.norms(losses, [w], max_memory=20_000_000)
    else:
        ps.clipped_sum(losses, [w], max_norm=1.0, max_memory=20_000_000)

step(2)
w.grad = None
ps.empty_cache()
open("/proc/self/clear_refs", "w").write("5")
before = peak()
step(128)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets up glibc")
@pytest.mark.parametrize("asked", ["norms", "clipped_sum"])
@pytest.mark.parametrize("weight", [pytest.param("tanh", marks=pytest.mark.slow), "softmax"])
def test_memory_is_kept(weight: str, asked: str) -> None:
    """All gradients would take 512 MB."""
    more = megabytes(MEMORY_OF, weight, asked) - megabytes(MEMORY_OF, weight, "plain")
    assert more < 60


@pytest.mark.parametrize("weight", ["softmax", "used itself, too", "two ways", "newton schulz"])
def test_a_parameter_has_one_factor_whatever_leads_to_it(weight: str) -> None:
    found = []

    class Kinds(ps.Norms):
        def add(self, name: str, factor: Any) -> None:
            found.append(type(factor))

    p = params()
    ps.reduce(linear(WEIGHTS[weight](p), 3, 2), {"w": p["w"]}, Kinds("parameter"), max_memory=1)
    assert found == [Pulled]
