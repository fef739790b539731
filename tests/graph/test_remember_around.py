"""Recalled plans of programs that differ in what is around them, asked in several ways; and what is kept."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample.graph import remember
from tests import models
from tests.expanded.helpers import taken
from tests.graph.look_alikes import (  # noqa: F401
    EYES,
    LOOK_ALIKES,
    TURNS,
    N,
    Program,
    Step,
    X,
    check,
    data,
    is_recalled,
    leaf,
    look,
    nothing_remembered,
)
from tests.reference import Params, assert_same, definition

pytestmark = pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")


# --- programs that differ in what is around them ---


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Square layers, so that they could be taken for one another."""
    return models.mlp(N, N, N, N, seed=seed, dtype=dtype)


def square(model: nn.Module, x: Tensor = X) -> Tensor:
    """One loss per row."""
    return model(x).square().sum(1)


def frozen(*which: int) -> tuple[Params, Tensor]:
    model = mlp()
    for i in which:
        model[i].requires_grad_(False)
    return model, square(model)


def chosen(*names: str) -> tuple[Params, Tensor]:
    model = mlp()
    return {f"{i}": dict(model.named_parameters())[name] for i, name in enumerate(names)}, square(model)


def tied(how: str) -> tuple[Params, Tensor]:
    model = mlp()
    if how != "not":
        model[4].weight = model[0].weight
    return model, square(model) if how != "transposed" else (model(X) @ model[0].weight.t()).sum(1)


def given(x: Tensor, *, as_parameter: bool) -> tuple[Params, Tensor]:
    model = mlp()
    return [*model.parameters(), *[x] * as_parameter], square(model, x)


def stored(how: str) -> tuple[Params, Tensor]:
    model = mlp()
    with save_on_cpu() if how == "on cpu" else nullcontext():
        return model, square(lambda x: checkpoint(model, x, use_reentrant=False) if how == "again" else model(x))


def hooked(how: str) -> tuple[Params, Tensor]:
    model = mlp()
    h = model[:2](X)
    if how == "scaled":
        h.register_hook(lambda g: g * 3)
    if how == "kept":
        h.retain_grad()
    return model, square(model[2:], h)


def typed(dtype: torch.dtype) -> tuple[Params, Tensor]:
    w, v = (leaf(N, N, seed=seed, dtype=dtype) for seed in (1, 2))
    return [w, v], ((X.to(dtype) @ w) * v).abs().sum(1)


def shaped(B: int, T: int) -> tuple[Params, Tensor]:
    w, v = leaf(N, N), leaf(N)
    return [w, v], ((data(B, T, N) @ w) * v).sum((1, 2)).sin()


class Turned(torch.autograd.Function):
    """A transpose, or the identity, by what its class says."""

    dims = (0, 1)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.transpose(*Turned.dims).clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.transpose(*Turned.dims)


def custom(*dims: int) -> tuple[Params, Tensor]:
    Turned.dims = dims
    w = leaf(N, N)
    return [w], Turned.apply((X @ w).tanh()).sin().sum(1)


FIRST, SECOND = mlp(1), mlp(2)
NAMES = list(dict(FIRST.named_parameters()))
SURROUNDINGS: dict[str, list[Program]] = {
    "frozen": [frozen, lambda: frozen(0), lambda: frozen(2), lambda: frozen(0, 4)],
    "order": [lambda: chosen(*NAMES), lambda: chosen(*NAMES[::-1]), lambda: chosen("2.weight", "0.weight")],
    "subset": [lambda: chosen("0.weight"), lambda: chosen("2.weight"), lambda: chosen("4.weight", "0.bias")],
    "twice": [lambda: chosen("0.weight", "2.weight"), lambda: chosen("0.weight", "0.weight", "2.weight")],
    "tied": [lambda: tied("not"), lambda: tied("plain"), lambda: tied("transposed")],
    "models": [
        lambda: ([*FIRST.parameters()], square(SECOND, FIRST(X))),
        lambda: ([*SECOND.parameters()], square(SECOND, FIRST(X))),
        lambda: ([*SECOND.parameters(), *FIRST.parameters()], square(SECOND, FIRST(X))),
        lambda: ([*FIRST.parameters()], square(FIRST, FIRST(X))),
    ],
    "inputs": [
        lambda: given(X, as_parameter=False),
        lambda: given(leaf(N, N), as_parameter=False),
        lambda: given(leaf(N, N), as_parameter=True),
    ],
    "storage": [lambda: stored("as usual"), lambda: stored("again"), lambda: stored("on cpu")],
    "hooks": [lambda: hooked("none"), lambda: hooked("scaled"), lambda: hooked("kept")],
    "dtypes": [lambda d=d: typed(d) for d in (torch.float32, torch.float64, torch.complex128, torch.bfloat16)],
    "shapes": [lambda B=B, T=T: shaped(B, T) for B, T in [(4, 6), (6, 4), (4, 3), (3, 8), (24, 1)]],
    "custom": [lambda: custom(0, 1), lambda: custom(0, 0)],
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_in_turn(name: str) -> None:
    programs = SURROUNDINGS[name]
    for program in [*programs, *programs[::-1], *programs]:
        check(program, rtol=1e-2 if name == "dtypes" else 1e-8)


MEETING: dict[str, tuple[Step, Step]] = {
    "mean": (lambda h, w: h - h.mean(1).unsqueeze(1), lambda h, w: h - h.mean(0).unsqueeze(1)),
    "softmax": (lambda h, w: h.softmax(1), lambda h, w: h.softmax(0)),
    "transpose": (lambda h, w: h.transpose(0, 0) + h, lambda h, w: h.transpose(0, 1) + h),
    "product": (lambda h, w: EYES["eye"] @ h, lambda h, w: EYES["any"] @ h),
    "rows": (lambda h, w: h[torch.arange(N)], lambda h, w: h[torch.tensor(TURNS["turned"])] + h),
    "statistics": (
        lambda h, w: F.batch_norm(h, torch.zeros(N).double(), torch.ones(N).double()),
        lambda h, w: F.batch_norm(h, torch.zeros(N).double(), torch.ones(N).double(), training=True),
    ),
    "batch of data": (lambda h, w: h + (w[:, :1] * X[:1].clone()).sum(0), lambda h, w: h + (w[:, :1] * X).sum(0)),
}


@pytest.mark.parametrize("name", MEETING)
def test_interaction_is_seen_after_a_graph_without(name: str) -> None:
    w, (apart, together) = leaf(N, N), MEETING[name]
    for step in (apart, together, apart, together, together, apart):
        losses = step((X @ w).tanh(), w).sin().sum(1)
        want = definition(losses, [w])
        if step is together:
            with pytest.raises(ps.InteractionError):
                ps.grad(losses, [w], independent=True, retain_graph=True)
            assert_same(ps.grad(losses, [w]), want)
        else:
            assert_same(ps.grad(losses, [w], independent=True), want)


# --- what is asked, and by which way ---

ASKED: dict[str, Callable[[Tensor, nn.Module], Any]] = {
    "norms": ps.norms,
    "norms per parameter": lambda losses, model: ps.norms(losses, model, per="parameter"),
    "clipped sum": lambda losses, model: ps.clipped_sum(losses, model, max_norm=0.5),
    "out": lambda losses, model: ps.grad(losses, model, out=_buffers(model, len(losses))),
    "several": lambda losses, model: ps.reduce(losses, model, ps.Norms(), ps.SecondMoment(), ps.Stack()),
    "little memory": lambda losses, model: ps.reduce(losses, model, ps.ClippedSum(0.5), ps.Gram(), max_memory=0),
}


def _buffers(model: nn.Module, batch: int) -> dict[str, Tensor]:
    return {name: p.new_full((batch, *p.shape), torch.nan) for name, p in model.named_parameters()}


def flat(result: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(result)


class Convolutional(nn.Module):
    """Images, norms, a token that all samples share, a table and a head tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(N, N, 3, padding=1), nn.GroupNorm(2, N)
        self.table, self.token = nn.Embedding(N, N), nn.Parameter(torch.ones(N, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(self.table(x.argsort(1)) + self.token)).relu()
        return (h @ self.table.weight.t()).sum(1)


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("make", [mlp, lambda: Convolutional().double()], ids=["mlp", "convolutional"])
def test_every_verb_gives_what_it_gave(name: str, make: Callable[[], nn.Module]) -> None:
    model, ask = make(), ASKED[name]
    ps.grad(square(model, data(N, N, seed=8)), model)
    losses = square(model)
    assert is_recalled(losses, model)
    got = flat(ask(losses, model))
    remember._PLANS.clear()
    want = flat(ask(square(model), model))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class Recurrent(nn.Module):
    """Time and batch of the same size, told apart by a flag alone."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.rnn, self.head = nn.RNN(N, N, batch_first=batch_first), nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("wants_inputs", [False, True])
def test_calls_with_the_batch_in_either_dim(wants_inputs: bool) -> None:
    x = data(N, N, N)
    for first in (True, False, True, True, False, False):
        model, given = Recurrent(first).double(), x.clone().requires_grad_(wants_inputs)
        want = definition(model(x).square().sum((1, 2) if first else (0, 2)), model)
        ps.call_for_per_sample_grads(model, batch_first=first)(given).square().sum().backward()
        assert_same(taken(model), want)
        if wants_inputs:
            twin = x.clone().requires_grad_()
            model(twin).square().sum().backward()
            torch.testing.assert_close(given.grad, twin.grad)


def test_calls_of_one_graph_read_in_two_ways() -> None:
    model, x = mlp(), data(N, N, N)
    for first in (True, False, True, False):
        want = definition(model(x).square().sum((1, 2) if first else (0, 2)), model)
        ps.call_for_per_sample_grads(model, batch_first=first)(x).square().sum().backward()
        assert_same(taken(model), want)


class Swapped(nn.Module):
    """Data whose dims change places before any weight is met: no graph shows it."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.layers, self.swapped = mlp(), swapped

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.transpose(0, 1).contiguous() if self.swapped else x)


def test_calls_that_differ_in_what_is_known_inside() -> None:
    x = data(N, N, N)
    for swapped in (False, True, False, True, True, False):
        model = Swapped(swapped)
        want = definition(model(x).square().sum((0, 2) if swapped else (1, 2)), model)
        ps.call_for_per_sample_grads(model)(x).square().sum().backward()
        assert_same(taken(model), want)


def test_calls_with_and_without_gradients_of_inputs() -> None:
    """A mean loss asks for them apart."""
    model = mlp()
    want = definition(square(model), model)
    for wanted in (False, True, True, False, True):
        for reduction in ("sum", "mean", "sum"):
            x = X.clone().requires_grad_(wanted)
            total = ps.call_for_per_sample_grads(model, loss_reduction=reduction)(x).square().sum()
            (total / (N if reduction == "mean" else 1)).backward()
            assert_same(taken(model), want)
            if wanted:
                expected = torch.autograd.grad(square(model, x).sum(), x)[0]
                torch.testing.assert_close(x.grad, expected / (N if reduction == "mean" else 1))


# --- what is kept ---


def test_the_same_graph_twice() -> None:
    model = mlp()
    losses = square(model)
    want = definition(losses, model)
    for keep in (True, True, False):
        assert_same(ps.grad(losses, model, retain_graph=keep), want)
    assert len(remember._PLANS) == 1
    with pytest.raises(RuntimeError, match="was freed by an earlier backward"):
        ps.grad(losses, model)


def test_after_a_capture_that_failed() -> None:
    model = mlp()
    for _ in range(2):
        losses = square(model)
        with torch.no_grad():
            model[2].weight.add_(0.1)  # which the backward needs as it was
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            ps.grad(losses, model)
    check(lambda: (model, square(model)))


def test_nothing_is_kept_alive() -> None:
    """Neither a model nor what its graphs hold, also after an error."""
    model, x = mlp(), X.clone()
    for _ in range(3):
        losses = square(model, x)
        ps.grad(losses, model)
    with pytest.raises(RuntimeError, match="was freed by an earlier backward"):
        ps.grad(losses, model)
    assert len(remember._PLANS) == 1
    held = [weakref.ref(t) for t in (model, x, losses, *model.parameters())]
    del model, x, losses
    gc.collect()
    assert all(ref() is None for ref in held)


def test_classes_of_custom_functions_are_not_kept_alive() -> None:
    """Nor what their backward knows."""

    def once() -> list[weakref.ref[Any]]:
        model = mlp()

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * model[0].bias.detach()

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                return g * model[0].bias.detach()

        w = leaf(N, N)
        check(lambda: ([w], Scaled.apply(X @ w).sum(1)))
        return [weakref.ref(Scaled), weakref.ref(model)]

    held = once()
    gc.collect()
    assert all(ref() is None for ref in held)


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    w = leaf(3)

    def program(B: int) -> tuple[Params, Tensor]:
        return [w], (data(B, 3) * w).sin().sum(1)

    for B in range(3, remember._MOST + 20):
        for size in (2, B):
            ps.grad(program(size)[1], [w])
    assert len(remember._PLANS) == remember._MOST
    assert is_recalled(program(2)[1], [w])
    assert not is_recalled(program(3)[1], [w])


def test_packed_sequences_leave_no_plans() -> None:
    """Where their samples lie is data of one call."""
    model = nn.RNN(N, N).double()
    for lengths in ([4, 3, 2], [4, 4, 1], [3, 3, 3]):
        packed = pack_sequence([data(n, N, seed=n) for n in lengths])
        want = definition(torch.stack([model(data(n, N, seed=n))[0].sin().sum() for n in lengths]), model)
        ps.call_for_per_sample_grads(model, batch_size=3)(packed)[0].data.sin().sum().backward()
        assert_same(taken(model), want)
    assert not remember._PLANS


def test_several_threads_at_once() -> None:
    """The same outlines, with other answers, in other threads."""
    programs = [program for name in ("softmax", "transpose", "losses") for program in LOOK_ALIKES[name].values()]
    failures: list[Exception] = []

    def run(start: int) -> None:
        try:
            for program in programs[start:] + programs[:start]:
                check(program)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(start,)) for start in range(0, len(programs), 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
