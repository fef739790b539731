"""`persample.grad` inside the modes a user may have switched on: the same numbers as outside."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import persample as ps
from tests import models
from tests.models import Program
from tests.modes import default_dtype
from tests.reference import assert_same, definition

PROGRAMS: dict[str, Callable[[], Program]] = {
    "mlp": partial(models.mlp_and_losses, positions=(6,), dtype=torch.float32),
    "cnn": partial(models.cnn_and_losses, dtype=torch.float32),
    "tied": partial(models.tied_and_losses, dtype=torch.float32),
    "lstm": partial(models.recurrent_and_losses, dtype=torch.float32),
}


def program(fn: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[fn.__name__] = fn
    return fn


@program
def experts() -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), torch.randn(5, 3)

    def losses() -> Tensor:
        out = torch.zeros_like(x)
        for expert, rows in zip(net, (torch.tensor([3, 0]), torch.tensor([1, 4, 2])), strict=True):
            out = out.index_add(0, rows, expert(x[rows]).tanh())
        return out.square().sum(1)

    return net, losses


@program
def probed() -> Program:
    net, x, order = nn.Linear(3, 3), torch.randn(5, 3), torch.eye(5)[torch.tensor([1, 0, 3, 4, 2])]
    return net, lambda: net(order @ net(x).tanh()).square().sum(1)


@program
def loop() -> Program:
    net, x = nn.Linear(3, 3), torch.randn(5, 3)
    return net, lambda: torch.stack([net(one).square().sum() for one in x])


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def anomaly_detection() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            yield


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),  # as good as any other device that is not the losses'
    "default float64": lambda: default_dtype(torch.float64),
    "default float16": lambda: default_dtype(torch.float16),
    "deterministic": deterministic,
    "anomaly detection": anomaly_detection,
    "counting flops": lambda: FlopCounterMode(display=False),
    "saved tensors hooks": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", MODES)
def test_the_callers_modes_change_nothing(mode: str, name: str) -> None:
    torch.manual_seed(0)
    model, forward = PROGRAMS[name]()
    losses, want = forward(), definition(forward(), model)
    with MODES[mode]():
        got = ps.grad(losses, model)
    assert_same(got, want, rtol=1e-4)


def test_hooks_of_modules_are_run_and_do_no_harm() -> None:
    """Full backward hooks put a Function around every layer."""
    torch.manual_seed(0)
    model, x = models.mlp(), torch.randn(5, 3).double()
    want, seen = definition(model(x).square().sum(1), model), []
    for layer in list(model)[1:]:
        layer.register_full_backward_hook(lambda *_: seen.append(1))
    assert_same(ps.grad(model(x).square().sum(1), model), want)
    assert seen


def test_retained_gradients_of_activations() -> None:
    torch.manual_seed(0)
    model, x = models.mlp(), torch.randn(5, 3).double()
    h = model[0](x)
    h.retain_grad()
    losses = model[2](h.tanh()).square().sum(1)
    assert_same(ps.grad(losses, model), definition(model(x).square().sum(1), model))


def test_a_functional_call_with_other_parameters() -> None:
    torch.manual_seed(0)
    model, x = models.mlp(), torch.randn(5, 3).double()
    params = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    losses = lambda: torch.func.functional_call(model, params, (x,)).square().sum(1)  # noqa: E731
    assert_same(ps.grad(losses(), params), definition(losses(), params))
    assert not any(bool(g.any()) for g in ps.grad(losses(), model).values())


def test_inputs_are_parameters_like_any_other() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(5, 3).double().requires_grad_()
    params = {"x": x, "weight": model.weight}
    got = ps.grad(model(x).tanh().sum(1), params)
    assert_same(got, definition(model(x).tanh().sum(1), params))
    assert not got["x"][0, 1:].any()


@pytest.mark.parametrize("shape", [(0, 3), (2, 3), (1, 3)])
@pytest.mark.parametrize("strided", [False, True])
def test_empty_and_strided_parameters(shape: tuple[int, int], strided: bool) -> None:
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(shape).t().contiguous().t() if strided else torch.randn(shape))
    v, x = nn.Parameter(torch.randn(2, 3)), torch.randn(5, 3)
    losses = lambda: torch.cat([x @ w.t(), x @ v.t()], 1).tanh().sum(1)  # noqa: E731
    assert_same(ps.grad(losses(), [w, v]), definition(losses(), [w, v]), rtol=1e-5)
