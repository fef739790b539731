"""The docs list the rules of the engine that there are."""

from __future__ import annotations

from persample.graph.flows import FLOWS
from persample.graph.rules import RULES
from tests.graph.ops_page import PAGE, render


def test_the_page_is_the_one_that_is_generated() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.graph.ops_page"


def test_every_node_with_a_rule_is_listed() -> None:
    page = render()
    assert not [node for node in RULES.keys() | FLOWS.keys() if f"`{node}`" not in page]
