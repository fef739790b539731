"""Every case at every batch size: `persample.grad` is the definition, and leaves nothing behind."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from tests.cases import CASES, Case, graph_nodes
from tests.reference import Params, assert_same, definition, named

ALL = [pytest.param(case, B, id=f"{case}-B{B}") for case in CASES for B in case.batches]
LARGEST = [(case, max(case.batches)) for case in CASES]
INTERACTING = [pytest.param(case, B, id=str(case)) for case, B in LARGEST if case.interacts]
INDEPENDENT = [pytest.param(case, B, id=str(case)) for case, B in LARGEST if not (case.interacts or case.slow_path)]


@pytest.mark.parametrize(("case", "B"), ALL)
def test_grad_is_the_definition(case: Case, B: int) -> None:
    params, forward = case.build(B)
    want = _reference(case, B, params, forward())
    losses = forward()
    with _untouched(params), _warnings_of(case):
        got = ps.grad(losses, params)
    assert isinstance(got, dict if isinstance(params, nn.Module | Mapping) else tuple)
    assert_same(got, want, rtol=case.rtol)


@pytest.mark.parametrize(("case", "B"), INTERACTING)
def test_independent_refuses_interaction(case: Case, B: int) -> None:
    params, forward = case.build(B)
    losses = forward()
    with _untouched(params), pytest.raises(ps.InteractionError):
        ps.grad(losses, params, independent=True)


@pytest.mark.parametrize(("case", "B"), INDEPENDENT)
def test_independent_accepts_the_rest(case: Case, B: int) -> None:
    params, forward = case.build(B)
    want = definition(forward(), params)
    losses = forward()
    with _untouched(params), _warnings_of(case):
        assert_same(ps.grad(losses, params, independent=True), want, rtol=case.rtol)


def _reference(case: Case, B: int, params: Params, losses: Tensor) -> dict[str, Tensor]:
    """The definition, after making sure that the case shows what it says it shows."""
    assert losses.shape == (B,)
    assert set(case.nodes) <= set(graph_nodes(losses))
    want = definition(losses, params)
    if max(case.batches) == B:
        assert {name for name, g in want.items() if not g.any()} == set(case.zeros)
    return want


@contextmanager
def _warnings_of(case: Case) -> Iterator[None]:
    """Every warning is an error, except the one a case is entitled to."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if case.slow_path or case.interacts:
            warnings.simplefilter("ignore", ps.PerformanceWarning)
        yield


@contextmanager
def _untouched(params: Params) -> Iterator[None]:
    """The block must not change a parameter, its gradient, or what hangs on parameters and modules."""
    tensors = named(params)
    for p in tensors.values():
        p.grad = torch.full_like(p, 7.0)
    before, grads = _fingerprint(params), {name: p.grad for name, p in tensors.items()}
    yield
    assert _fingerprint(params) == before
    for name, p in tensors.items():
        assert p.grad is grads[name], f"{name}.grad was replaced"
        assert bool((p.grad == 7).all()), f"{name}.grad was changed"


def _fingerprint(params: Params) -> dict[str, Any]:
    """Versions, hooks and attributes of every parameter, attributes and hooks of every module."""
    seen: dict[str, Any] = {
        f"parameter {name}": (
            p._version,
            sorted(vars(p)),
            _keys(p._backward_hooks),
            _keys(p._post_accumulate_grad_hooks),
        )
        for name, p in named(params).items()
    }
    if isinstance(params, nn.Module):
        for name, module in params.named_modules():
            seen[f"module {name}"] = {key: _keys(value) for key, value in vars(module).items()}
    return seen


def _keys(value: object) -> object:
    """A mapping's keys, anything else by identity."""
    return list(value) if isinstance(value, Mapping) else id(value)
