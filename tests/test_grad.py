"""Every case at every batch size: `persample.grad` is the definition, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import Tensor, nn

import persample as ps
from tests.cases import CASES, Case, untouched, warnings_of
from tests.reference import Params, assert_same, definition, nodes_behind

ALL = [pytest.param(case, B, id=f"{case}-B{B}") for case in CASES for B in case.batches]
LARGEST = [(case, max(case.batches)) for case in CASES]
INTERACTING = [pytest.param(case, B, id=str(case)) for case, B in LARGEST if case.interacts]
INDEPENDENT = [pytest.param(case, B, id=str(case)) for case, B in LARGEST if not (case.interacts or case.slow_path)]


@pytest.mark.parametrize(("case", "B"), ALL)
def test_grad_is_the_definition(case: Case, B: int) -> None:
    params, forward = case.build(B)
    want = _reference(case, B, params, forward())
    losses = forward()
    with untouched(params), warnings_of(case):
        got = ps.grad(losses, params)
    assert isinstance(got, dict if isinstance(params, nn.Module | Mapping) else tuple)
    assert_same(got, want, rtol=case.rtol)


@pytest.mark.parametrize(("case", "B"), INTERACTING)
def test_independent_refuses_interaction(case: Case, B: int) -> None:
    params, forward = case.build(B)
    losses = forward()
    with untouched(params), pytest.raises(ps.InteractionError):
        ps.grad(losses, params, independent=True)


@pytest.mark.parametrize(("case", "B"), INDEPENDENT)
def test_independent_accepts_the_rest(case: Case, B: int) -> None:
    params, forward = case.build(B)
    want = definition(forward(), params)
    losses = forward()
    with untouched(params), warnings_of(case):
        assert_same(ps.grad(losses, params, independent=True), want, rtol=case.rtol)


def _reference(case: Case, B: int, params: Params, losses: Tensor) -> dict[str, Tensor]:
    """The definition, after making sure that the case shows what it says it shows."""
    assert losses.shape == (B,)
    assert set(case.nodes) <= set(graph_nodes(losses))
    want = definition(losses, params)
    if max(case.batches) == B:
        assert {name for name, g in want.items() if not g.any()} == set(case.zeros)
    return want


def graph_nodes(losses: Tensor) -> list[str]:
    """The name of every node of the graph behind `losses`."""
    return [node.name() for node in nodes_behind(losses)]
