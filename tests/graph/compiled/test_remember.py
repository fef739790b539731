"""Plans of graphs that hold compiled regions are recalled, and are those that would have been made."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample.graph import remember
from tests.graph.look_alikes import is_recalled, nothing_remembered  # noqa: F401
from tests.models import mlp, squares
from tests.reference import assert_same, definition

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def fast(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="aot_eager", **options)


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def exact(model: nn.Module, losses: Callable[[Any], Tensor], compiled: Any, params: Any = None) -> bool:
    """Gradients are those of the definition; was the plan recalled?"""
    params = model if params is None else params
    want, now = definition(losses(model), params), losses(compiled)
    found = is_recalled(now, dict(params.named_parameters()) if isinstance(params, nn.Module) else params)
    assert_same(ps.grad(now, params), want)
    return found


def test_the_second_call_recalls_the_plan() -> None:
    model = mlp(3, 4, 4, 2)
    compiled = fast(model)
    assert not exact(model, lambda m: squares(m(data(5, 3))), compiled)
    assert exact(model, lambda m: squares(m(data(5, 3, seed=1))), compiled)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-2)
    assert exact(model, lambda m: squares(m(data(5, 3, seed=2))), compiled)


def test_other_batch_sizes_have_plans_of_their_own() -> None:
    model = mlp(3, 4, 4, 2)
    compiled = fast(model, dynamic=True)
    found = [exact(model, lambda m, B=B: squares(m(data(B, 3))), compiled) for B in (5, 4, 5, 2, 4)]
    assert found == [False, False, True, False, True]


def test_other_parameters_have_plans_of_their_own() -> None:
    model = mlp(3, 4, 4, 2)
    compiled, some = fast(model), {"2.weight": model.get_parameter("2.weight")}
    losses = lambda m: squares(m(data(5, 3)))  # noqa: E731
    assert [exact(model, losses, compiled, params) for params in (None, some, None, some)] == [False, False, True, True]


def test_training_and_evaluation_are_two_regions() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.0), nn.Linear(4, 2)).double()
    compiled = fast(model)
    for training in (False, True, False, True):
        model.train(training)
        with pytest.warns(ps.PerformanceWarning) if training else torch.enable_grad():
            exact(model, lambda m: squares(m(data(5, 3))), compiled)


def test_two_models_of_one_form_are_not_mistaken_for_each_other() -> None:
    """The same shapes everywhere, but samples lie in another dim inside of one region."""
    layer = nn.Linear(4, 4).double()
    runs = [lambda x: layer(x).tanh(), lambda x: layer(x.transpose(0, 1)).transpose(0, 1).tanh()]
    compiled = [fast(run) for run in runs]
    for _ in range(3):
        for run, made in zip(runs, compiled, strict=True):
            x = data(4, 4, 4)
            want = definition(squares(run(x)), layer)
            assert_same(ps.grad(squares(made(x)), layer), want)


def test_saved_tensors_of_other_shapes_are_another_plan() -> None:
    """Neither cotangents nor leaves show how long sequences are."""
    layer = nn.Linear(3, 2).double()
    mean = lambda x: layer(x).tanh().mean(1)  # noqa: E731
    compiled = fast(mean, dynamic=True)
    for T in (6, 4, 6, 5, 4):
        x = data(5, T, 3, seed=T)
        assert_same(ps.grad(squares(compiled(x)), layer), definition(squares(mean(x)), layer))


def test_two_regions_and_a_weight_that_is_used_outside_too() -> None:
    first, second = mlp(3, 4, 4), mlp(4, 4, 4, seed=1)
    model = nn.ModuleList([first, second])
    fasts = fast(first), fast(second)

    def losses(parts: Any, x: Tensor) -> Tensor:
        h = parts[1](parts[0](x).tanh())
        return squares(h @ first[0].weight)

    for seed in range(3):
        x = data(5, 3, seed=seed)
        want, now = definition(losses(model, x), model), losses(fasts, x)
        assert is_recalled(now, dict(model.named_parameters())) == (seed > 0)
        assert_same(ps.grad(now, model), want)


def test_warnings_come_again() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    compiled = fast(model)
    for _ in range(3):
        with pytest.warns(ps.PerformanceWarning):
            ps.norms(squares(compiled(data(5, 3))), model)


def test_a_graph_that_is_gone_is_refused_as_before() -> None:
    model = mlp(3, 4, 2)
    compiled = fast(model)
    for _ in range(3):
        losses = squares(compiled(data(5, 3)))
        losses.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            ps.norms(losses, model)
        losses = squares(compiled(data(5, 3)))
        first = ps.norms(losses, model, retain_graph=True)
        assert torch.equal(first, ps.norms(losses, model))


def test_no_plan_keeps_a_region_alive() -> None:
    model = mlp(3, 4, 2)
    compiled = fast(model)
    losses = squares(compiled(data(5, 3)))
    regions = [ref(node._forward_cls) for node in _nodes(losses) if hasattr(node, "_forward_cls")]
    ps.norms(losses, model)
    assert regions
    assert len(remember._PLANS) == 1
    del losses, compiled
    torch.compiler.reset()
    gc.collect()
    assert all(region() is None for region in regions)


def _nodes(losses: Tensor) -> list[Any]:
    found = [losses.grad_fn]
    for node in found:
        found += [child for child, _ in node.next_functions if child is not None and child not in found]  # type: ignore[union-attr]
    return found
