"""Which elementwise calls are linear in their cotangents, and which computed zeros are known for zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims  # which registers prims.fma
from torch import Tensor, fx

from persample.graph.compiled.linear import is_zero, linear_in
from persample.graph.compiled.reader import Reader, calls_by_name
from persample.graph.compiled.states import Separable, Summed
from persample.graph.layout import Block
from persample.graph.read.compiled import Unreadable, retraced, simpler_ops

aten = torch.ops.aten
B = 4


def traced(function: Callable[[Tensor, Tensor], Any]) -> fx.GraphModule:
    """A backward of one cotangent g and one saved tensor, both (4, 4): sizes tell nothing."""
    simpler = simpler_ops(calls_by_name().keys())
    return retraced(lambda g, x: (function(g, x),), [torch.randn(B, B), torch.randn(B, B)], simpler)


def last(graph: fx.GraphModule) -> fx.Node:
    return graph.graph.output_node().args[0][0]  # type: ignore[index, return-value, union-attr]


def state(function: Callable[[Tensor, Tensor], Any]) -> Any:
    graph = traced(function)
    g = next(iter(graph.graph.nodes))
    return Reader(graph, {g: Block(B, B)}, B).state(last(graph))


LINEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda g, x: g * x,
    "quotient": lambda g, x: g / x,
    "negative": lambda g, x: -g,
    "sum": lambda g, x: g + g * x,
    "with zero": lambda g, x: g + torch.zeros_like(x),
    "choice": lambda g, x: torch.where(x > 0, g, 0.0),
    "backward of tanh": lambda g, x: aten.tanh_backward(g, x),
    "product and sum": lambda g, x: torch.ops.prims.fma(g, x, g),
}
NOT_LINEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "square": lambda g, x: g * g,
    "with a number": lambda g, x: g + 1,
    "with what was saved": lambda g, x: g + x,
    "from what was saved": lambda g, x: x - g,
    "divided by": lambda g, x: x / g,
    "choice of a number": lambda g, x: torch.where(x > 0, g, 1.0),
    "chosen by": lambda g, x: torch.where(g > 0, x, g),
    "clamp": lambda g, x: g.clamp(-1, 1),
    "exponential": lambda g, x: g.exp(),
    "second of a backward": lambda g, x: aten.tanh_backward(x, g),
    "sum of products": lambda g, x: torch.ops.prims.fma(x, x, g),
    "product of both": lambda g, x: torch.ops.prims.fma(g, g, g),
    "sign": lambda g, x: g.sign(),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str) -> None:
    assert state(LINEAR[name]) == Separable(Block(B, B))


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_not_linear(name: str) -> None:
    graph = traced(NOT_LINEAR[name])
    g = next(iter(graph.graph.nodes))
    assert not linear_in(last(graph), [g])
    with pytest.raises(Unreadable, match=r"aten|prims"):
        state(NOT_LINEAR[name])


REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "transposed and added": lambda g, x: g + g.t(),
    "broadcast along samples": lambda g, x: g + g[:, :1].t(),
    "mean over samples": lambda g, x: g.mean(0),
    "a sum that comes back": lambda g, x: g - g.sum(0),
    "running sum over samples": lambda g, x: g.cumsum(0),
    "written into what was saved": lambda g, x: aten.slice_scatter(x, g[:, :2], 1, 0, 2),
    "rows written, not added": lambda g, x: aten.index_put(torch.zeros(B, B), [torch.tensor([0, 0, 1, 2])], g),
    "rows that are broadcast": lambda g, x: aten.index_put(torch.zeros(B, B), [torch.tensor([0, 1, 1, 2])], g[0], True),
    "rows written by samples": lambda g, x: aten.scatter(torch.zeros(B, B), 0, torch.zeros(B, B, dtype=torch.int64), g),
    "padded with ones": lambda g, x: aten.constant_pad_nd(g, [1, 0], 1.0),
    "product of both": lambda g, x: g @ g,
    "flipped along samples": lambda g, x: g.flip(0),
    "maximum": lambda g, x: g.amax(1),
    "cat with what was saved": lambda g, x: torch.cat([g, x], 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(Unreadable):
        state(REFUSED[name])


SUMMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda g, x: g.sum(0),
    "product": lambda g, x: g.t() @ x,
    "other product": lambda g, x: x @ g,
    "rows": lambda g, x: aten.index_put(torch.zeros(7, B), [torch.tensor([0, 0, 5, 2])], g, True),
    "scaled": lambda g, x: (g.t() @ x) * x,
    "squared, for each sample": lambda g, x: (g.t() @ x).square(),
    "twice": lambda g, x: (g.t() @ x) + (x.t() @ g).t(),
}


@pytest.mark.parametrize("name", SUMMED)
def test_sums_over_samples(name: str) -> None:
    assert isinstance(state(SUMMED[name]), Summed)


@pytest.mark.parametrize(
    "zero", [lambda x: torch.zeros(3), lambda x: torch.full((3,), 0.0), lambda x: x.new_zeros(2).expand(4, 2)]
)
def test_zeros(zero: Callable[[Tensor], Tensor]) -> None:
    assert is_zero(last(traced(lambda g, x: zero(x))))


@pytest.mark.parametrize(
    "other", [lambda x: torch.ones(3), lambda x: torch.full((3,), 1e-30), lambda x: x * 0, lambda x: x.new_empty(2)]
)
def test_not_zeros(other: Callable[[Tensor], Tensor]) -> None:
    assert not is_zero(last(traced(lambda g, x: other(x))))
