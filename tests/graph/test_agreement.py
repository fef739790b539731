"""Rules, probe and definition agree about every edge of every case."""

from __future__ import annotations

import pytest

from persample.graph.execute.plan import plan
from persample.graph.read.roots import Roots
from tests.cases import CASES, Case
from tests.graph.claims import refuted_cotangents, refuted_flows
from tests.reference import named

BATCHES = [pytest.param(case, max(case.batches), id=str(case)) for case in CASES if max(case.batches) > 1]


@pytest.mark.parametrize(("case", "B"), BATCHES)
def test_no_claim_is_refuted(case: Case, B: int) -> None:
    params, forward = case.build(B)
    losses = forward()
    found = plan(Roots.of_losses(losses), list(named(params).values()))
    assert refuted_cotangents(found, losses) == []
    assert refuted_flows(found) == []
