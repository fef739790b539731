"""The probe on the same matrix: what the data of a call say is what the node does."""

from __future__ import annotations

import pytest

from tests.graph.matrix import flows
from tests.graph.matrix.flows import probed, wrong_flows
from tests.graph.matrix.nodes import harvest


def check(name: str, step: int) -> None:
    asked = [
        (site, combination)
        for site, _ in harvest()[name]
        if not any(0 in shape for shape in site.shapes)  # which are not asked
        for combination in list(flows.combinations(site, step == 1))[::step]
    ]
    assert [what for site, combination in asked for what in wrong_flows(site, combination, probed)[0]] == []


@pytest.mark.parametrize("name", sorted(harvest()))
def test_the_probe_is_right(name: str) -> None:
    check(name, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(harvest()))
def test_the_probe_is_right_in_every_place(name: str) -> None:
    check(name, 1)
