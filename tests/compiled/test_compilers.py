"""The private names of PyTorch's compilers do what is said of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from persample.compiled.compilers import (
    OpenInputs,
    captured,
    compiled_by,
    could_not_capture,
    cuts_at_a_number,
    dims_of,
    draws_in_python,
    is_linear,
    losses_length,
    open_sizes,
    too_many_captures,
    traced_graph,
    without_checkpoints,
)


class Backend:
    """Keeps the graphs that Dynamo captures."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []
        self.inputs: list[tuple[Any, ...]] = []

    def __call__(self, graph: GraphModule, _: Any) -> Any:
        self.graphs.append(graph)

        def run(*inputs: Any) -> Any:
            self.inputs.append(inputs)
            return graph(*inputs)

        return run


def test_parameters_are_inputs_as_they_are() -> None:
    backend, weight, x = Backend(), torch.nn.Parameter(torch.ones(3)), torch.ones(2, 3)
    run = captured(lambda x: (x * weight).sum(1), backend, dynamic=None, limit=8)
    run(x)
    assert any(t is weight for t in backend.inputs[0])
    assert any(t is x for t in backend.inputs[0])


def test_what_is_not_captured_whole_is_told_from_other_errors() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    with pytest.raises(RuntimeError) as caught:
        captured(breaks, Backend(), dynamic=None, limit=8)(torch.ones(2))
    assert could_not_capture(caught.value)
    assert not too_many_captures(caught.value)
    assert not could_not_capture(ValueError())


def test_the_limit_of_one_step_is_its_own() -> None:
    def losses(x: Tensor, flag: int) -> Tensor:
        return x * flag

    other = captured(losses, Backend(), dynamic=False, limit=1)
    other(torch.ones(2), 1)
    run = captured(losses, Backend(), dynamic=False, limit=2)
    for flag in (1, 2):
        run(torch.ones(2), flag)
    with pytest.raises(Exception, match=r"fullgraph|recompile limit") as caught:
        run(torch.ones(2), 3)
    assert too_many_captures(caught.value)
    run(torch.ones(2), 1)


def test_recurrent_layers_are_captured() -> None:
    backend, layer = Backend(), torch.nn.LSTM(2, 3)
    captured(lambda x: layer(x)[0], backend, dynamic=None, limit=8)(torch.ones(4, 1, 2))
    assert len(backend.graphs) == 1


def test_open_sizes_have_names() -> None:
    backend = Backend()
    run = captured(lambda x, y: (x @ y).sum(1), backend, dynamic=None, limit=8)
    for rows in (3, 4):
        run(torch.ones(rows, 5), torch.ones(5, 2))
    dims = dims_of(backend.graphs[-1])
    assert dims is not None
    name = losses_length(backend.graphs[-1], 0)
    assert name is not None
    assert open_sizes(dims, backend.inputs[-1])[name] == 4
    given = [known.like(t, {name: 7}) for known, t in zip(dims, backend.inputs[-1], strict=True) if known is not None]
    assert sorted(tuple(t.shape) for t in given if isinstance(t, Tensor)) == [(5, 2), (7, 5)]
    assert losses_length(backend.graphs[0], 0) is None


def test_graphs_for_open_sizes_say_which_they_serve() -> None:
    inputs = OpenInputs([torch.ones(4, 3)], lambda i, d: d == 0)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    size = graph.call_method("size", (x, 0))
    graph.output((graph.call_method("expand", (x, size, 3)),))
    run = compiled_by("aot_eager", GraphModule({}, graph), inputs.tensors)
    assert inputs.serve(4)
    assert inputs.serve(9)
    assert run(torch.ones(9, 3))[0].shape == (9, 3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_random_numbers_are_those_of_eager_mode(backend: str) -> None:
    def draw(x: Tensor) -> list[Tensor]:
        return [torch.nn.functional.dropout(x, 0.5), torch.rand_like(x)]

    x = torch.ones(100)
    run = compiled_by(backend, traced_graph(draw, [x]), [x])
    torch.manual_seed(3)
    got = run(x)
    torch.manual_seed(3)
    for a, b in zip(got, draw(x), strict=True):
        assert torch.equal(a, b)


def test_checkpointed_regions_are_opened() -> None:
    backend, layer = Backend(), torch.nn.Linear(3, 3)
    from torch.utils.checkpoint import checkpoint

    captured(lambda x: checkpoint(layer, x, use_reentrant=False), backend, dynamic=None, limit=8)(torch.ones(2, 3))
    assert any("checkpoint" in str(node.target) for node in backend.graphs[0].graph.nodes)
    opened = without_checkpoints(backend.graphs[0])
    assert not any("checkpoint" in str(node.target) for node in opened.graph.nodes)
    assert torch.equal(opened(*backend.inputs[0])[0], layer(torch.ones(2, 3)))


@pytest.mark.parametrize(
    ("size", "linear"),
    [
        (lambda n: n, True),
        (lambda n: 2 * n + 3, True),
        (lambda n: 1 / n, True),
        (lambda n: n // 2, False),
        (lambda n: n % 4, False),
        (lambda n: n * n, False),
        (lambda n: min(n, 64), False),
        (lambda n: (n // 2) / n, False),
    ],
)
def test_sizes_that_grow_linearly(size: Callable[[int], float], linear: bool) -> None:
    backend = Backend()
    run = captured(lambda x: x.sum(1) * size(len(x)), backend, dynamic=True, limit=8)
    run(torch.ones(5, 3))
    (graph,) = backend.graphs
    name = losses_length(graph, 0)
    dims = dims_of(graph)
    assert name is not None
    assert dims is not None
    assert is_linear(graph, name, open_sizes(dims, backend.inputs[0])) is linear


@pytest.mark.parametrize(
    ("fn", "cuts"),
    [
        (lambda x: x[:64], True),
        (lambda x: x[:2], False),
        (lambda x: x[1:], False),
        (lambda x: x[:, :2], False),
        (lambda x: x[: len(x)], False),
        (lambda x: x.split(64)[0], True),
        (lambda x: x.split(2, 1)[0], False),
    ],
)
def test_cuts(fn: Callable[[Tensor], Tensor], cuts: bool) -> None:
    graphs = [traced_graph(lambda x: [fn(x) + 0], [torch.ones(n, 3)]) for n in (5, 11, 8)]
    assert any(map(cuts_at_a_number, zip(*(g.graph.nodes for g in graphs), strict=True))) is cuts


def test_numbers_that_dynamo_draws_in_python() -> None:
    found = []

    def backend(graph: GraphModule, _: Any) -> Any:
        found.append(draws_in_python(graph))
        return graph

    captured(lambda x: x * random.randint(1, 9), backend, dynamic=None, limit=8)(torch.ones(2))
    captured(lambda x: x * 3, backend, dynamic=None, limit=8)(torch.ones(2))
    assert found == [True, False]
