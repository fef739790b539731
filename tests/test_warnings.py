"""A slow path says so: once per op and parameter in a call, with names and shapes, at the caller's line."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from tests.case_library.functions import OwnLinear, Square


def caught(run: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return found


def two_uses() -> tuple[dict[str, Tensor], Callable[[], Tensor]]:
    """One op without a rule, on the way to two parameters, twice."""
    torch.manual_seed(0)
    params, x = {"w": nn.Parameter(torch.randn(3, 3)), "b": nn.Parameter(torch.randn(3))}, torch.randn(5, 3)
    w, b = params["w"], params["b"]
    return params, lambda: OwnLinear.apply(OwnLinear.apply(x, w, b).tanh(), w, b).square().sum(1)


def test_one_warning_per_op_and_parameter() -> None:
    params, losses = two_uses()
    found = caught(lambda: ps.grad(losses(), params))
    assert [w.category for w in found] == [ps.PerformanceWarning] * 2
    assert sorted(name for name in ("'w'", "'b'") for w in found if name in str(w.message)) == ["'b'", "'w'"]


def test_the_warning_names_op_parameter_and_shapes() -> None:
    params, losses = two_uses()
    with pytest.warns(
        ps.PerformanceWarning,
        match=r"no fast rule for custom OwnLinear .*parameter 'w' \(cotangents of shape \[\(5, 3\)\].*exact, but 5 ",
    ):
        ps.grad(losses(), {"w": params["w"]})


def test_another_op_gets_another_warning() -> None:
    params, losses = two_uses()
    w, x = params["w"], torch.randn(5, 3)
    found = caught(lambda: ps.grad(losses() + torch.cdist(w, x).sum(0), [w]))
    assert len(found) == 2
    assert len({str(each.message).split(" on its way")[0] for each in found}) == 2
    assert all("parameter '0'" in str(each.message) for each in found)


def test_every_call_warns_again() -> None:
    params, losses = two_uses()
    assert len(caught(lambda: [ps.grad(losses(), params) for _ in range(3)])) == 6


def test_python_shows_it_once_per_place_by_default() -> None:
    """The filter a user has: the same model in a training loop is not a flood."""
    params, losses = two_uses()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            ps.grad(losses(), params)
    assert len(found) == 2


def test_the_warning_points_to_the_caller() -> None:
    params, losses = two_uses()
    for each in caught(lambda: ps.grad(losses(), params)):
        assert each.filename == __file__


def test_only_parameters_that_were_asked_for_are_named() -> None:
    params, losses = two_uses()
    (only,) = caught(lambda: ps.grad(losses(), {"b": params["b"]}))
    assert "'b'" in str(only.message)


def test_a_module_path_is_named() -> None:
    net, x = nn.ModuleDict({"head": nn.Linear(3, 3)}), torch.randn(5, 3)
    found = caught(lambda: ps.grad(OwnLinear.apply(x, net["head"].weight, net["head"].bias).square().sum(1), net))
    assert any("'head.weight'" in str(each.message) for each in found)


@pytest.mark.parametrize("B", [0, 1])
def test_small_batches_are_never_slow(B: int) -> None:
    w, b = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))
    assert not caught(lambda: ps.grad(OwnLinear.apply(torch.randn(B, 3), w, b).square().sum(1), [w, b]))


def test_a_function_between_fast_layers_is_no_slow_path() -> None:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(5, 3)
    assert not caught(lambda: ps.grad(net[1](Square.apply(net[0](x))).square().sum(1), net))


def test_warnings_can_be_errors() -> None:
    """Nothing is left behind on the graph, and the next call works."""
    params, losses = two_uses()
    graph = losses()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ps.PerformanceWarning, match="no fast rule for custom OwnLinear"):
            ps.grad(graph, params, retain_graph=True)
    assert len(caught(lambda: ps.grad(graph, params))) == 2


def test_the_errors_have_useful_bases() -> None:
    assert issubclass(ps.PerformanceWarning, UserWarning)
    assert issubclass(ps.InteractionError, RuntimeError)
    assert issubclass(ps.UnsupportedError, RuntimeError)
