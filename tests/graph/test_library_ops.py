"""Ops registered with ``torch.library``: right as they are, fast when taught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import persample as ps
from persample.factors import Factor, Outer
from persample.graph import teach
from persample.graph.ops import custom
from persample.graph.ops.dims import keep
from persample.graph.ops.table import Layouts
from persample.graph.ops.use import Use
from persample.graph.read.nodes import op_name
from persample.graph.read.site import Flow, Outcome, Site
from tests.expanded.helpers import r, squares
from tests.reference import assert_same, definition


@torch.library.custom_op("persample_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight, for x (N, d) and weight (d, p)."""
    return x @ weight


@torch.library.custom_op("persample_tests::of_lists", mutates_args=())
def of_lists(pair: list[Tensor], scale: float) -> Tensor:
    """The same, times a number, of a list of both."""
    return scale * pair[0] @ pair[1]


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _pull(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return g @ weight.t(), x.t() @ g


def _keep_list(ctx: Any, inputs: tuple[list[Tensor], float], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[0])
    ctx.scale = inputs[1]


def _pull_list(ctx: Any, g: Tensor) -> tuple[list[Tensor], None]:
    x, weight = ctx.saved_tensors
    return [ctx.scale * g @ weight.t(), ctx.scale * x.t() @ g], None


product.register_autograd(_pull, setup_context=_keep)
of_lists.register_autograd(_pull_list, setup_context=_keep_list)

CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "persample_tests::product": product,
    "persample_tests::of_lists": lambda x, w: of_lists([x, w], 2.0),
}
NAMES = pytest.mark.parametrize("name", CALLS)
FORMS: dict[str, Callable[[str], Any]] = {
    "name": lambda name: name,
    "name of the overload": lambda name: f"{name}.default",
    "definition": lambda name: {"persample_tests::product": product, "persample_tests::of_lists": of_lists}[name],
    "packet": lambda name: getattr(torch.ops.persample_tests, name.split("::")[1]),
    "overload": lambda name: getattr(torch.ops.persample_tests, name.split("::")[1]).default,
}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    torch.manual_seed(0)
    before = custom._TAUGHT.copy()
    yield
    custom._TAUGHT.clear()
    custom._TAUGHT.update(before)


def net(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, a: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return squares(call((x @ a).tanh(), w).tanh() @ b)


def params() -> list[Tensor]:
    return [r(4, 3, grad=True), r(3, 3, grad=True), r(3, 2, grad=True)]


def rule(use: Use) -> Factor | None:
    rows = use.rows(1)
    x, _ = use.site.node.saved_tensors  # type: ignore[attr-defined]
    scale = getattr(use.site.node, "scale", 1.0)
    return Outer(rows.group(x), rows.group(use.g), scale) if use.k == 1 and rows is not None else None


def flow(site: Site, k: int, layouts: Layouts) -> Outcome:
    layout = layouts[0]
    assert layout is not None
    return Flow.SHARED if k == 1 else keep(layout, site.shapes[0], site.target(k), [0, None])


@NAMES
def test_an_op_that_is_not_taught_is_exact_and_warned_of(name: str) -> None:
    """Exact, one sample at a time, and said by the op's own name."""
    found = net(CALLS[name], r(5, 4), *(given := params()))
    want = definition(found, given)
    with pytest.warns(ps.PerformanceWarning, match=f"no fast rule for custom {name} "):
        assert_same(ps.grad(found, given), want)


@NAMES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flow", [None, flow], ids=["asked", "flow"])
def test_a_taught_op_is_exact_and_not_slow(name: str, form: str, flow: Any) -> None:
    """Warnings are errors here: nothing is slow."""
    assert teach(FORMS[form](name), flow)(rule) is rule
    found = net(CALLS[name], r(5, 4), *(given := params()))
    want = definition(found, given)
    assert_same(ps.grad(found, given, retain_graph=True), want)
    assert_same(ps.grad(found, given, independent=True), want)


def test_another_op_learns_nothing() -> None:
    teach(product)(rule)
    found = net(CALLS["persample_tests::of_lists"], r(5, 4), *(given := params()))
    with pytest.warns(ps.PerformanceWarning, match="of_lists"):
        ps.grad(found, given)


def test_twice_is_refused_in_any_form() -> None:
    teach(product)(rule)
    for form in FORMS.values():
        with pytest.raises(ValueError, match="persample_tests::product already has a rule"):
            teach(form("persample_tests::product"))(rule)


def test_what_is_no_op_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there is no op 'persample_tests::missing'.*import"):
        teach("persample_tests::missing")
    for thing in ("missing", torch.mm, 3):
        with pytest.raises(TypeError, match=r"expected an autograd.Function, an op of torch.library or its name"):
            teach(thing)  # type: ignore[arg-type]


def test_a_function_of_the_users_that_is_called_the_same() -> None:
    """The generated Functions' names do not make an op."""
    methods = {"forward": staticmethod(lambda ctx, x: 2 * x), "backward": staticmethod(lambda ctx, g: 2 * g)}
    name = "GeneratedBackwardFor_persample_tests_product_default"
    mine = type(name, (torch.autograd.Function,), methods)
    node = mine.apply(r(3, grad=True)).grad_fn
    assert op_name(node) == f"custom {name}"
    assert op_name(product(r(2, 3), r(3, 3, grad=True)).grad_fn) == "custom persample_tests::product"
