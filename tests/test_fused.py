"""Reductions inside the graph of a compiled region: the engine's answers, and the engine where that is not certain."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample as ps
from persample import fused
from persample.graph.compiled import part
from persample.graph.read import compiled as read
from tests.models import mlp, squares
from tests.reference import assert_same, definition

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
MIXED = (ps.Norms(), ps.ClippedSum(0.5), ps.SecondMoment(), ps.Variance(), ps.Stack(), ps.Gram())


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Graphs that are run as they were traced, in place of Inductor's, which takes seconds for each."""
    torch.compiler.reset()
    fused._KEPT.clear()
    if request.param == "aot_eager":
        monkeypatch.setattr(read, "_is_inductors", lambda function: True)
        for module in (fused, part):
            monkeypatch.setattr(module, "compiled_by_inductor", lambda graph, example: graph)
    yield request.param
    torch.compiler.reset()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether code has answered, call by call."""
    calls: list[bool] = []
    take = fused.Fused.take

    def noted(self: fused.Fused, whole: Any) -> bool:
        calls.append(take(self, whole))
        return calls[-1]

    monkeypatch.setattr(fused.Fused, "take", noted)
    return calls


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def same(got: Any, want: Any) -> None:
    """Tensors, in containers of the same kinds, alike; and nothing that a gradient could go through."""
    assert type(got) is type(want)
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7, equal_nan=True)
        assert not got.requires_grad
    elif isinstance(want, dict):
        assert list(got) == list(want)
        same(list(got.values()), list(want.values()))
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            same(a, b)
    if hasattr(want, "clipping"):
        same(got.clipping, want.clipping)
        assert (got.clipping.dropped, got.clipping.sensitivity) == (want.clipping.dropped, want.clipping.sensitivity)


def in_turn(
    model: nn.Module,
    losses: Callable[[Any, int], Tensor],
    compiled: Any,
    *reductions: Any,
    params: Any = None,
    n: int = 6,
) -> None:
    """Other data and weights in each of some calls, all of which have the engine's answers."""
    params = model if params is None else params
    for seed in range(n):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p))
        want = ps.reduce(losses(model, seed), params, *reductions)
        same(ps.reduce(losses(compiled, seed), params, *reductions), want)


@pytest.mark.parametrize("reduction", MIXED, ids=lambda r: type(r).__name__)
def test_every_reduction(reduction: Any, backend: str, taken: list[bool]) -> None:
    model = mlp(3, 4, 4, 2)
    in_turn(model, lambda m, i: squares(m(data(5, 3, seed=i))), torch.compile(model, backend=backend), reduction)
    assert taken == [False] * 3 + [True] * 3


def test_several_reductions_and_parameters_in_a_list(backend: str, taken: list[bool]) -> None:
    model = mlp(3, 4, 4, 2)
    reductions = (*MIXED, ps.Norms("parameter"), ps.ClippedSum(1.0, per="parameter"), ps.ClippedSum(1.0, gamma=0.1))
    compiled, losses = torch.compile(model, backend=backend), lambda m, i: squares(m(data(5, 3, seed=i)))
    in_turn(model, losses, compiled, *reductions)
    in_turn(model, losses, compiled, *reductions, params=list(model.parameters()))
    assert taken == 2 * ([False] * 3 + [True] * 3)


def test_the_definition(backend: str, taken: list[bool]) -> None:
    model, y = mlp(3, 4, 4, 3), torch.tensor([0, 2, 1, 1, 0])
    losses = lambda x: F.cross_entropy(model(x), y, reduction="none")  # noqa: E731
    compiled = torch.compile(losses, backend=backend, fullgraph=True)
    for seed in range(5):
        x = data(5, 3, seed=seed)
        assert_same(ps.grad(compiled(x), model), definition(losses(x), model))
    assert taken[-1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.inner = nn.Embedding(7, 8, padding_idx=2), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.inner(self.table(ids)).tanh()) @ self.table.weight.t()


def test_tied_weights(backend: str, taken: list[bool]) -> None:
    model = Tied().double()
    ids = lambda i: torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(i))  # noqa: E731
    in_turn(model, lambda m, i: squares(m(ids(i))), torch.compile(model, backend=backend), ps.Norms(), ps.Stack())
    assert taken[-1]


def test_convolutions(backend: str, taken: list[bool]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)).double()
    compiled = torch.compile(model, backend=backend)
    in_turn(model, lambda m, i: squares(m(data(4, 2, 5, 5, seed=i))), compiled, ps.Norms(), ps.ClippedSum(1.0))
    assert taken[-1]


def test_other_batch_sizes(backend: str, taken: list[bool]) -> None:
    model = mlp(3, 4, 4, 2)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    sizes = (5, 2, 5, 1, 7)
    in_turn(model, lambda m, i: squares(m(data(sizes[i % 5], 3, seed=i))), compiled, ps.Norms(), ps.Stack(), n=15)
    assert any(taken)


def test_a_part_of_the_parameters(backend: str, taken: list[bool]) -> None:
    model = mlp(3, 4, 4, 2)
    some = {name: p for name, p in model.named_parameters() if name in ("2.weight", "4.bias")}
    losses, compiled = lambda m, i: squares(m(data(5, 3, seed=i))), torch.compile(model, backend=backend)
    for params in (some, model, some):
        in_turn(model, losses, compiled, ps.Norms(), params=params, n=4)
    assert taken[-1]


def test_other_names_for_the_same_parameters(backend: str, taken: list[bool]) -> None:
    model = mlp(3, 4, 2)
    compiled = torch.compile(model, backend=backend)
    params = [dict(model.named_parameters()), {f"my {n}": p for n, p in model.named_parameters()}]
    params.append({**params[0], "unused": nn.Parameter(data(3))})
    params.append({**params[0], "again": model.get_parameter("0.weight")})
    losses = lambda m, i: squares(m(data(5, 3, seed=i)))  # noqa: E731
    for _ in range(2):
        for given in params:
            in_turn(model, losses, compiled, ps.Stack(), ps.ClippedSum(1.0), params=given, n=4)
    assert sum(taken) >= 8


def test_what_is_not_one_region_is_left_to_the_engine(backend: str, taken: list[bool]) -> None:
    first, second = mlp(3, 4, 4), mlp(4, 4, 4, seed=1)
    model = nn.ModuleList([first, second])
    parts = [torch.compile(m, backend=backend) for m in model]
    in_turn(model, lambda m, i: squares(m[1](m[0](data(5, 3, seed=i)).tanh())), parts, ps.Norms())
    inside = torch.compile(first, backend=backend)
    outside = lambda m, i: squares(m(data(5, 3, seed=i)) @ first[0].weight)  # noqa: E731
    in_turn(first, outside, inside, ps.Norms())
    assert not any(taken)


def test_what_else_is_left_to_the_engine(backend: str, taken: list[bool]) -> None:
    model = mlp(3, 4, 2)
    compiled, weights = torch.compile(model, backend=backend), torch.rand(5).double()
    losses = lambda m, i=0: squares(m(data(5, 3, seed=i)))  # noqa: E731

    class Own(ps.Norms):
        pass

    in_turn(model, losses, compiled, ps.WeightedSum(weights))
    in_turn(model, losses, compiled, ps.Norms([["0.weight"], ["0.bias"]]))
    in_turn(model, losses, compiled, ps.ClippedSum(weights=lambda norms: norms / norms), ps.Norms())
    in_turn(model, losses, compiled, Own())
    out = ps.grad(losses(model), model)
    for _ in range(4):
        assert ps.grad(losses(compiled), model, out=out)["0.weight"] is out["0.weight"]
    for _ in range(5):
        ps.backward(losses(compiled), model, ps.ClippedSum(1.0))
    assert not taken


def test_the_graph_can_be_kept(backend: str, taken: list[bool]) -> None:
    model = mlp(3, 4, 2)
    compiled = torch.compile(model, backend=backend)
    for seed in range(6):
        x = data(5, 3, seed=seed)
        want, total = ps.norms(squares(model(x)), model), torch.autograd.grad(squares(model(x)).sum(), model[0].weight)
        losses = squares(compiled(x))
        for _ in range(3):
            same(ps.norms(losses, model, retain_graph=True), want)
        same(ps.norms(losses, model, retain_graph=True), want)
        same(torch.autograd.grad(losses.sum(), model[0].weight), total)
        with pytest.raises(RuntimeError, match="second time"):
            ps.norms(losses, model)
    assert taken[-1]


def test_results_are_nobody_elses(backend: str, taken: list[bool]) -> None:
    """The gradient of a bias is the cotangent itself: what is done to one must not be seen in the other."""
    model, x = nn.Linear(3, 2).double(), data(5, 3)
    compiled = torch.compile(model, backend=backend)
    want = ps.grad(model(x).sum(1), model)
    for _ in range(6):
        losses = compiled(x).sum(1)
        for _ in range(2):
            got = ps.grad(losses, model, retain_graph=True)
            same(got, want)
            for g in got.values():
                g.zero_()
    assert taken[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e25, 1e-25])
def test_numbers_of_all_sizes(value: float, dtype: torch.dtype, backend: str, taken: list[bool]) -> None:
    model = mlp(3, 4, 2, dtype=dtype)
    compiled = torch.compile(model, backend=backend)
    losses = lambda m, i=0: squares(m(data(5, 3, seed=i).to(dtype)))  # noqa: E731
    in_turn(model, losses, compiled, ps.Norms(), ps.Stack(), n=5)
    in_turn(model, losses, compiled, ps.ClippedSum(1.0, nonfinite="drop"), n=5)
    in_turn(model, losses, compiled, ps.ClippedSum(1.0), n=5)
    assert taken[-1]

    def scaled(m: Any) -> Tensor:
        factors = torch.ones(5, dtype=dtype)
        factors[2] = value
        return losses(m) * factors

    before = len(taken)
    same(
        ps.reduce(scaled(compiled), model, ps.Norms(), ps.Stack()),
        ps.reduce(scaled(model), model, ps.Norms(), ps.Stack()),
    )
    drop = ps.ClippedSum(1.0, nonfinite="drop")
    same(ps.reduce(scaled(compiled), model, drop), ps.reduce(scaled(model), model, drop))
    assert len(taken) == before + 2
    if not torch.tensor(value, dtype=dtype).isfinite():
        with pytest.raises(ps.NonFiniteError, match="2"):
            ps.clipped_sum(scaled(compiled), model, 1.0)


def test_many_doubts_and_the_code_is_left_alone(backend: str, taken: list[bool]) -> None:
    model = mlp(3, 4, 2)
    compiled = torch.compile(model, backend=backend)
    for i in range(20):
        x = data(5, 3, seed=i)
        if i > 4:
            x[1] = float("inf")
        want = ps.reduce(squares(model(x)), model, ps.ClippedSum(1.0, nonfinite="drop"))
        same(ps.reduce(squares(compiled(x)), model, ps.ClippedSum(1.0, nonfinite="drop")), want)
    (kept,) = fused._KEPT.values()
    assert [one.refused for one in kept.values()] == [True]
    assert sum(taken) == 2


def test_code_that_is_wrong_is_not_used(backend: str, taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    make = fused.compiled_by_inductor

    def wrong(graph: Any, example: Any) -> Any:
        run = make(graph, example)
        return lambda *given: [t if t.dtype == torch.bool else t * 1.5 for t in run(*given)]

    monkeypatch.setattr(fused, "compiled_by_inductor", wrong)
    model = mlp(3, 4, 2)
    in_turn(model, lambda m, i: squares(m(data(5, 3, seed=i))), torch.compile(model, backend=backend), ps.Norms())
    assert not any(taken)


def test_what_cannot_be_compiled_is_tried_once(
    backend: str, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def fails(graph: Any, example: Any) -> Any:
        tries.append(1)
        raise ValueError

    monkeypatch.setattr(fused, "compiled_by_inductor", fails)
    model = mlp(3, 4, 2)
    in_turn(model, lambda m, i: squares(m(data(5, 3, seed=i))), torch.compile(model, backend=backend), ps.Norms())
    assert tries == [1]
    assert not any(taken)


def test_large_results_and_long_graphs_are_left_to_the_engine(
    backend: str, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(3, 4, 2)
    compiled, losses = torch.compile(model, backend=backend), lambda m, i: squares(m(data(5, 3, seed=i)))
    monkeypatch.setattr(fused, "_LARGEST", 5 * 26 * 8 - 1)
    in_turn(model, losses, compiled, ps.Stack())
    assert not taken
    monkeypatch.setattr(fused, "_LARGEST", 5 * 26 * 8)
    in_turn(model, losses, compiled, ps.Stack())
    assert taken[-1]
    monkeypatch.setattr(fused, "_LONGEST", 5)
    in_turn(model, losses, compiled, ps.Norms())
    assert not taken[-1]


def test_code_goes_with_its_region(backend: str, taken: list[bool]) -> None:
    model = mlp(3, 4, 2)
    compiled = torch.compile(model, backend=backend)
    in_turn(model, lambda m, i: squares(m(data(5, 3, seed=i))), compiled, ps.Norms(), ps.Stack())
    assert taken[-1]
    assert len(fused._KEPT) == 1
    weight = ref(model[0].weight)
    del model, compiled
    torch.compiler.reset()
    for _ in range(2):  # what was traced is freed by the first
        gc.collect()
    assert not fused._KEPT
    assert weight() is None


def test_few_codes_are_kept(backend: str) -> None:
    model = mlp(3, 4, 2)
    compiled = torch.compile(model, backend=backend)
    for i in range(1, 25):
        ps.clipped_sum(squares(compiled(data(5, 3))), model, i / 7)
    assert [len(kept) for kept in fused._KEPT.values()] == [fused._MOST]
