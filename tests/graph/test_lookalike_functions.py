"""Custom Functions may be called anything: no table of PyTorch's own ops is ever read for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import persample as ps
from persample.graph.read.nodes import op_name
from tests.graph.table import FIELDS, having
from tests.reference import assert_same, definition

TABLES = {
    **{field: having(field) for field in FIELDS},
    # What is looked for by name elsewhere.
    "others": ["CheckpointFunction", "CompiledFunction", "BackwardHookFunction", "AccumulateGrad", "CppFunction"],
}


def product(name: str) -> Any:
    """x @ w, as a Function of this name."""

    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


def twice(name: str) -> Any:
    """2 x, as a Function of this name."""
    methods = {"forward": staticmethod(lambda ctx, x: 2 * x), "backward": staticmethod(lambda ctx, g: 2 * g)}
    return type(name, (torch.autograd.Function,), methods)


def net(name: str, x: Tensor, weights: list[Tensor]) -> Tensor:
    """Two alike with a weight each, as bundles look for; one of data, and one of a weight, as views of weights are."""
    a, b, c, d = weights
    h = x @ a
    for w in (b, c):
        h = product(name).apply(h, w).tanh()
    return twice(name).apply(h) @ twice(name).apply(d)


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("table", TABLES)
def test_no_table_is_fooled_by_a_name(table: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    weights = [torch.randn(3, 3, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(4)]
    want = definition(net("Whatever", x, weights).square().sum(1), weights)
    for name in TABLES[table]:
        losses = net(name, x, weights).square().sum(1)
        try:
            assert_same(ps.grad(losses, weights, retain_graph=True), want)
            assert_same(ps.grad(losses, weights[1:2], retain_graph=True), {"0": want["1"]})
            assert_same(ps.grad(losses, weights[3:]), {"0": want["3"]})
        except Exception as error:
            raise AssertionError(f"a Function called {name}") from error


@pytest.mark.parametrize("table", TABLES)
def test_a_custom_node_stands_under_no_name_of_a_table(table: str) -> None:
    w = torch.ones(2, requires_grad=True)
    for name in TABLES[table]:
        found = op_name(twice(name).apply(w).grad_fn)
        assert found == f"custom {name}"
        assert found not in TABLES[table]


def test_nodes_of_extensions_stand_under_no_name_of_a_table() -> None:
    """Those written in C++ have one type for all, and any name."""
    for names in TABLES.values():
        for name in names:
            node = type("CppFunction", (), {"name": lambda self, name=name: f"{name}Backward0"})()
            assert op_name(node) == f"C++ {name}"
            assert op_name(node) not in names


def test_the_users_name_is_in_messages() -> None:
    w = torch.ones(3, 2, requires_grad=True)
    losses = product("Addmm").apply(torch.ones(4, 3), w).sum(1)
    with pytest.warns(ps.PerformanceWarning, match=r"no fast rule for custom Addmm on its way to parameter 'w'"):
        ps.grad(losses, {"w": w})
