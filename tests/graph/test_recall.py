"""A plan that is recalled is the plan that would have been made.

Every program is run several times, and in turn with others that look like it: all are compared with the definition.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample.graph import recall
from persample.graph.recall import outline
from persample.graph.roots import Roots
from tests.cases import CASES, Case
from tests.expanded.helpers import taken
from tests.reference import Params, assert_same, definition, named

N = 4
Program = Callable[[], tuple[Params, Tensor]]  # parameters and losses
BATCHED = [case for case in CASES if max(case.batches) > 1]
FEW = BATCHED[::5]
pytestmark = pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    recall._PLANS.clear()
    yield
    recall._PLANS.clear()


def data(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def leaf(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """A parameter."""
    return data(*shape, seed=seed, dtype=dtype).requires_grad_()


def look(losses: Tensor, params: Params) -> Hashable:
    """What a graph has in common with those that look like it."""
    seen = outline(Roots.of_losses(losses), list(named(params).values()))
    return None if seen is None else seen.key


def is_recalled(losses: Tensor, params: Params) -> bool:
    """Is there a plan for this graph?"""
    seen = outline(Roots.of_losses(losses), list(named(params).values()))
    return seen is not None and recall.recall(seen) is not None


def check(program: Program, rtol: float = 1e-8) -> None:
    """Compare with the definition."""
    params, losses = program()
    want = definition(losses, params)
    assert_same(ps.grad(losses, params), want, rtol=rtol)


# --- every case, with other numbers ---


def other_numbers(case: Case, seed: int) -> tuple[Params, Tensor]:
    """The case's program with random numbers of another seed, which is made from its name."""
    made = case.build.args[0]
    params, forward = case.build.func(replace(made, name=f"{made.name} {seed}"), max(case.batches))
    return params, forward()


def recalled_in_turn(case: Case) -> bool:
    """Run a case three times, with other numbers each; was it recalled at the end?"""
    recall._PLANS.clear()
    for seed in range(2):
        check(lambda seed=seed: other_numbers(case, seed), case.rtol)
    params, losses = other_numbers(case, 2)
    found = is_recalled(losses, params)
    want = definition(losses, params)
    assert_same(ps.grad(losses, params), want, rtol=case.rtol)
    return found


def test_every_fifth_case_with_other_numbers() -> None:
    found = [case.name for case in FEW if recalled_in_turn(case)]
    assert len(found) > 0.7 * len(FEW)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in BATCHED if case not in FEW], ids=str)
def test_other_cases_with_other_numbers(case: Case) -> None:
    recalled_in_turn(case)


# --- graphs that look alike and are not ---

LOOK_ALIKES: dict[str, Mapping[Any, Program]] = {}
Step = Callable[..., Tensor]


def on_cubes(step: Step, dims: tuple[int, int] = (1, 2)) -> tuple[Params, Tensor]:
    """A step on (N, N, N) between two layers, with a parameter along every dim; losses are sums over two dims."""
    before, after, row, column = leaf(N, N), leaf(N, N, seed=2), leaf(N, 1), leaf(N, 1, 1)
    h = step((data(N, N, N) @ before).tanh() * column + row)
    return [before, after, row, column], ((h @ after).sin() * data(N, N, N, seed=3)).sum(dims)


def steps(name: str, choices: Sequence[Any], step: Step) -> None:
    """Register a step with several choices of what it is given."""
    LOOK_ALIKES[name] = {choice: lambda c=choice: on_cubes(lambda h: step(h, c)) for choice in choices}


PAIRS = [(0, 1), (0, 2), (1, 2), (2, 0)]
TURNS = {"same": [0, 1, 2, 3], "turned": [1, 2, 3, 0], "one": [2, 2, 2, 2]}
EYES = {"eye": torch.eye(N).double(), "any": data(N, N, seed=4), "none": torch.zeros(N, N).double()}

LOOK_ALIKES["losses"] = {d: lambda d=d: on_cubes(lambda h: h, d) for d in [(1, 2), (0, 2), (0, 1)]}
steps("transpose", PAIRS, lambda h, d: h.transpose(*d))
steps("permute", [(0, 2, 1), (1, 2, 0), (2, 0, 1)], lambda h, d: h.permute(d))
steps("transpose twice", PAIRS, lambda h, d: h.transpose(*d).sin().transpose(*d))
steps("softmax", range(3), lambda h, d: h.softmax(d))
steps("cumsum", range(3), lambda h, d: h.cumsum(d))
steps("flip", [0, 1, (0, 2)], lambda h, d: h.flip(d))
steps("roll", [(1, 0), (1, 1), (2, 1)], lambda h, d: h.roll(*d))
steps("pad", range(3), lambda h, d: F.pad(h, [0, 0] * d + [1, -1]))
steps("unfold", range(3), lambda h, d: h.unfold(d, 1, 1).squeeze(-1))
steps("fourier", [(0,), (1,), (2,), (0, 2)], lambda h, d: torch.fft.fftn(h, dim=d).real)
steps("sum", range(3), lambda h, d: h + h.sum(d).unsqueeze(0))
steps("sum of two", PAIRS, lambda h, d: h * h.sum(d).unsqueeze(1))
steps("amax", range(3), lambda h, d: h + h.amax(d).unsqueeze(1))
steps("var", range(3), lambda h, d: h + h.var(d).unsqueeze(2))
steps("mean", range(3), lambda h, d: h - h.mean(d).unsqueeze(1))
steps("norm", range(3), lambda h, d: h + torch.linalg.vector_norm(h, dim=d).unsqueeze(1))
steps("select", [(0, 1), (0, 2), (1, 1), (2, 3)], lambda h, d: h.select(*d).unsqueeze(1) * h)
steps("slice", [0, 1, 2], lambda h, at: torch.cat([h[at : at + 2], h[2:]]))
steps("slice of columns", [0, 1, 2], lambda h, at: torch.cat([h[:, at : at + 2], h[:, 2:]], 1))
steps("unbind and stack", [(0, 0), (0, 1), (1, 0), (2, 1)], lambda h, d: torch.stack(h.unbind(d[0]), d[1]))
steps("split and cat", range(3), lambda h, d: torch.cat(h.split(N, d), d))
steps("diagonal", PAIRS, lambda h, d: h.diagonal(0, *d).unsqueeze(1) * h)
steps("expand", range(3), lambda h, d: h.select(d, 0).unsqueeze(1).expand(N, N, N) * h)
steps("rows", TURNS, lambda h, c: h[torch.tensor(TURNS[c])])
steps("columns", TURNS, lambda h, c: h.index_select(1, torch.tensor(TURNS[c])))
steps("matrix", EYES, lambda h, c: torch.tensordot(EYES[c], h, 1))
steps("masks of both", EYES, lambda h, c: (h * EYES[c]).sum(2).unsqueeze(1) * h)
steps("two ways", EYES, lambda h, c: h * EYES[c].unsqueeze(2) + h.transpose(0, 1) * EYES[c].unsqueeze(2))
steps("slope", [0.1, 0.5, 1.0], lambda h, a: F.leaky_relu(h, a))
steps("power", [2, 3, 2.0], lambda h, a: h**a)
steps("approximation", ["none", "tanh"], lambda h, a: F.gelu(h, approximate=a))
steps("clamp", [0.1, 0.5], lambda h, a: h.clamp(-a, a))
steps("in place", range(3), lambda h, d: h.clone().mul_(h.softmax(d)))
steps("written", range(3), lambda h, d: _written(h, d))
steps("dropout", [0.2, 0.7], lambda h, p: _dropped(h, p))
steps("scalar", [1, 2.5, -1], lambda h, a: torch.add(h, leaf(N), alpha=a) * a)


def _written(h: Tensor, d: int) -> Tensor:
    copy = h.clone()
    copy.select(d, 1).copy_(h.select(0, 1))
    return copy


def _dropped(h: Tensor, p: float) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return F.dropout(h, p)


def uses(name: str, choices: Sequence[Any], shapes: Sequence[tuple[int, ...]], use: Step) -> None:
    """Register a use of parameters of these shapes; the result's first dim holds the samples."""

    def program(choice: Any) -> tuple[Params, Tensor]:
        params = [leaf(*shape, seed=5 + i) for i, shape in enumerate(shapes)]
        return params, use(choice, *params).sin().flatten(1).sum(1)

    LOOK_ALIKES[name] = {choice: lambda c=choice: program(c) for choice in choices}


X, IDS = data(N, N), {seed: torch.randint(N, (N, N), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)}
GEOMETRIES = [(2, 1, 1), (1, 0, 1), (3, 2, 1), (1, 1, 2)]  # stride, padding, dilation: 4 places become 2
uses("addmm", [(1, 1), (0.5, 2), (0, 3)], [(N,), (N, N)], lambda c, b, w: torch.addmm(b, X, w, beta=c[0], alpha=c[1]))
uses("added in columns", [0, 1], [(N, 1), (1, N)], lambda c, a, b: X * a + (X * b).transpose(c, 1))
uses("part of a weight", [0, 1, 2], [(N, N)], lambda c, w: X[:, :2] @ w[:, c : c + 2].t())
uses("row of a weight", [(0, 0), (0, 3), (1, 2)], [(N, N)], lambda c, w: X * w.select(*c))
uses("turned weight", [(0, 1), (1, 0), (1, 1)], [(N, N)], lambda c, w: X @ w.transpose(*c))
uses("rolled weight", [(1, 0), (1, 1), (3, 1)], [(N, N)], lambda c, w: X @ w.roll(*c))
uses("padding", [-1, 0, 2], [(N, 3)], lambda c, w: F.embedding(IDS[0], w, padding_idx=c if c >= 0 else None))
uses("frequencies", [False, True], [(N, 3)], lambda c, w: F.embedding(IDS[0], w, scale_grad_by_freq=c))
uses("ids", [0, 1], [(N, 3)], lambda c, w: F.embedding(IDS[c], w))
uses("bags", ["sum", "mean"], [(N, 3)], lambda c, w: F.embedding_bag(IDS[0], w, mode=c))
uses("geometry", GEOMETRIES, [(N, N, 3), (N,)], lambda c, w, b: F.conv1d(data(N, N, N), w, b, *c))
uses("direction", [F.conv1d, F.conv_transpose1d], [(N, N, 3)], lambda c, w: c(data(N, N, N), w, padding=1))
uses("squares", [False, True], [(N, N)], lambda c, w: (data(N, N, N) @ w).transpose(0, 1 if c else 2))


def test_they_look_alike() -> None:
    """Or nothing would be tested: all but a few, where PyTorch takes other ways for other choices."""
    alike = [
        name
        for name, programs in LOOK_ALIKES.items()
        if len({look(losses, params) for params, losses in (program() for program in programs.values())}) == 1
    ]
    assert len(alike) >= len(LOOK_ALIKES) - 4


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_in_turn(name: str) -> None:
    programs = list(LOOK_ALIKES[name].values())
    for program in [*programs, *programs[::-1], *programs[::2], programs[1], programs[0]]:
        check(program)


# --- programs that differ in what is around them ---


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Square layers, so that they could be taken for one another."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N)).to(dtype)


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
    "batch of data": (lambda h, w: h + (w[:, :1] * X[:1]).sum(0), lambda h, w: h + (w[:, :1] * X).sum(0)),
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
    recall._PLANS.clear()
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
    assert len(recall._PLANS) == 1
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
    assert len(recall._PLANS) == 1
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

    for B in range(3, recall._MOST + 20):
        for size in (2, B):
            ps.grad(program(size)[1], [w])
    assert len(recall._PLANS) == recall._MOST
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
    assert not recall._PLANS


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
