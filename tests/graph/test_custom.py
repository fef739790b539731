"""Rules for custom autograd.Functions: taught, the engine takes their factors; not taught, it runs the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample.factors import Dense, Factor, Outer
from persample.graph.ops import custom
from persample.graph.ops.custom import teach
from persample.graph.ops.dims import keep
from persample.graph.ops.table import Layouts
from persample.graph.ops.use import Use
from persample.graph.read.site import Flow, Outcome, Site
from tests.expanded.helpers import check, r, sizes, squares
from tests.reference import assert_same, definition, vectors


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a test teaches is forgotten after."""
    torch.manual_seed(0)
    before = custom._TAUGHT.copy()
    yield
    custom._TAUGHT.clear()
    custom._TAUGHT.update(before)


def product() -> type[torch.autograd.Function]:
    """A new Function each time: factor · x weight, for x (..., d) and weight (d, p); it counts its backwards."""

    class Product(torch.autograd.Function):
        backwards = 0

        @staticmethod
        def forward(ctx: Any, factor: float, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            ctx.factor = factor
            return factor * x @ weight

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, Tensor]:
            Product.backwards += 1
            x, weight = ctx.saved_tensors
            return None, ctx.factor * g @ weight.t(), ctx.factor * (x.flatten(0, -2).t() @ g.flatten(0, -2))

    return Product


class Teacher:
    """A rule for a product that counts its calls."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, use: Use) -> Factor | None:
        self.asked.append(use.k)
        samples = use.rows(use.g.ndim - 1)
        if use.k != 1 or samples is None:
            return None
        x, _ = use.site.node.saved_tensors  # type: ignore[attr-defined]
        rows = [samples.group(t.flatten(0, -2)) for t in (x, use.g)]
        return Outer(*rows, scale=use.site.node.factor)  # type: ignore[attr-defined]


def stays(site: Site, k: int, layouts: Layouts) -> Outcome:
    """A flow for a product: the weight is shared, the data keep all their dims but the last."""
    if k == 1:
        return Flow.SHARED
    layout = layouts[0]
    assert layout is not None
    return keep(layout, site.shapes[0], site.target(k), [*range(len(site.shapes[0]) - 1), None])


FLOWS = pytest.mark.parametrize("flow", [None, stays], ids=["asked", "flow"])


def net(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """Parameters before, in and after the Function; those in it are used twice, once as computed ones."""

    def out(x: Tensor, a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        h = function.apply(0.5, (x @ a).tanh(), w)
        return function.apply(2.0, h, w.exp()).tanh() @ b

    return out


def params() -> list[Tensor]:
    return [r(4, 3, grad=True), r(3, 3, grad=True), r(3, 2, grad=True)]


@sizes
@FLOWS
@pytest.mark.parametrize("shape", [(4,), (2, 4), (5, 4)], ids=["rows", "positions", "T=B"])
def test_a_taught_function_is_exact_and_its_rule_is_asked(B: int, flow: Any, shape: tuple[int, ...]) -> None:
    function, rule = product(), Teacher()
    teach(function, flow)(rule)
    found = squares(net(function)(r(B, *shape), *(given := params())))
    want = definition(found, given)
    assert_same(ps.grad(found, given), want)
    assert set(rule.asked) == ({1} if B > 1 else set())


@FLOWS
@pytest.mark.parametrize("T", [2, 5], ids=["T=2", "T=B"])
def test_taught_with_the_batch_second(flow: Any, T: int) -> None:
    function, rule = product(), Teacher()
    teach(function, flow)(rule)
    found = squares(net(function)(r(T, 5, 4), *(given := params())), 1)
    want = definition(found, given)
    assert_same(ps.grad(found, given), want)
    assert rule.asked == [1, 1]


@FLOWS
def test_taught_with_folded_samples(flow: Any) -> None:
    function, rule = product(), Teacher()
    teach(function, flow)(rule)
    x = r(5, 3, 4)
    found = squares(net(function)(x.flatten(0, 1), *(given := params())).unflatten(0, (5, 3)))
    want = definition(found, given)
    assert_same(ps.grad(found, given), want)
    assert rule.asked == [1, 1]


@sizes
@FLOWS
def test_reductions_of_taught_factors(B: int, flow: Any) -> None:
    function = product()
    teach(function, flow)(Teacher())
    found = squares(net(function)(r(B, 2, 4), *(given := params())))
    want = vectors(definition(found, given)).norm(dim=1)
    (norms,) = ps.reduce(found, given, ps.Norms())
    assert_same([norms], {"0": want})


def test_a_function_that_is_not_taught_is_exact_and_warned_of() -> None:
    """Right, one sample at a time, and said."""
    function = product()
    found = squares(net(function)(r(5, 2, 4), *(given := params())))
    want = definition(found, given)
    with pytest.warns(ps.PerformanceWarning, match="Product"):
        assert_same(ps.grad(found, given), want)


def test_another_function_learns_nothing() -> None:
    function = product()
    child = type("Child", (function,), {})
    teach(function)(Teacher())
    found = squares(net(child)(r(5, 2, 4), *(given := params())))
    want = definition(found, given)
    with pytest.warns(ps.PerformanceWarning, match="Child"):
        assert_same(ps.grad(found, given), want)


@FLOWS
def test_a_rule_that_does_not_know(flow: Any) -> None:
    """None means the exact fallback."""
    function, asked = product(), []

    @teach(function, flow)
    def unsure(use: Use) -> None:
        asked.append(use.k)

    found = squares(net(function)(r(5, 2, 4), *(given := params())))
    want = definition(found, given)
    with pytest.warns(ps.PerformanceWarning, match="Product"):
        assert_same(ps.grad(found, given), want)
    assert asked == [1, 1]


def test_rules_save_backwards() -> None:
    """Taught wholly, the Function's backward runs once per use; each missing part costs more runs."""
    counts = {}
    for name, known, flow in [("none", False, None), ("rule", True, None), ("both", True, stays)]:
        function = product()
        if known:
            teach(function, flow)(Teacher())
        found = squares(net(function)(r(5, 2, 4), *(given := params())))
        if known:
            ps.grad(found, given)
        else:
            with pytest.warns(ps.PerformanceWarning):
                ps.grad(found, given)
        counts[name] = function.backwards
    assert counts["both"] <= 2
    assert counts["both"] < counts["rule"] < counts["none"]


def test_twice_is_refused() -> None:
    function, first = product(), Teacher()
    assert teach(function)(first) is first
    with pytest.raises(ValueError, match="Product already has a rule"):
        teach(function)(Teacher())
    assert custom._TAUGHT[function].rule is first


class Split(torch.autograd.Function):
    """Two results: x · gain and x + shift."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, gain)
        return x * gain, x + shift

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return g * gain + h, (g * x).sum(0), h.sum(0)


@sizes
@pytest.mark.parametrize("used", ["first", "second", "both"])
def test_several_results(B: int, used: str) -> None:
    @teach(Split)
    def rule(use: Use) -> Factor | None:
        x, _ = use.site.node.saved_tensors  # type: ignore[attr-defined]
        g, h = use.cotangents
        part = (g * x if g is not None else None) if use.k == 1 else h
        return Dense(part if part is not None else torch.zeros_like(x))

    a, gain, shift = given = [r(4, 3, grad=True), r(3, grad=True), r(3, grad=True)]
    one, two = Split.apply(r(B, 4) @ a, gain, shift)
    found = squares({"first": one, "second": two, "both": one * two}[used])
    want = definition(found, given)
    assert_same(ps.grad(found, given), want)


@sizes
def test_in_a_call_for_per_sample_grads(B: int) -> None:
    """A taught Function inside a recorded module."""
    function = product()
    teach(function)(Teacher())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w, self.b = (nn.Parameter(p.detach()) for p in params())

        def forward(self, x: Tensor) -> Tensor:
            return net(function)(x, self.a, self.w, self.b)

    module, x = Net(), r(B, 2, 4)
    check(module, x)


@pytest.mark.parametrize("flow", [None, lambda site, k, layouts: Flow.SHARED if k else Flow.PROBE])
def test_a_rule_that_looks_at_the_first_of_several_results_alone(flow: Any) -> None:
    """Where that one is not used, the rule does not know, and says so by itself."""

    @teach(Split, flow)
    def rule(use: Use) -> Factor:
        x, _ = use.site.node.saved_tensors  # type: ignore[attr-defined]
        return Dense(use.g * x if use.k == 1 else torch.zeros_like(use.g))

    a, gain, shift = given = [r(4, 3, grad=True), r(3, grad=True), r(3, grad=True)]
    found = squares(Split.apply(r(5, 4) @ a, gain, shift)[1])
    want = definition(found, given)
    with pytest.warns(ps.PerformanceWarning, match="Split"):
        assert_same(ps.grad(found, given), want)
