"""The docs list the rules of the engine that there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from persample.graph.flows import FLOWS
from persample.graph.rules import RULES
from tests.graph.ops_page import PAGE, render

PINNED = (Path(__file__).parents[2] / "constraints.txt").read_text()


@pytest.mark.skipif(
    f"torch=={torch.__version__.split('+')[0]}\n" not in PINNED, reason="nodes are those of the torch that is pinned"
)
def test_the_page_is_the_one_that_is_generated() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.graph.ops_page"


def test_every_node_with_a_rule_is_listed() -> None:
    page = PAGE.read_text()
    assert not [node for node in RULES.keys() | FLOWS.keys() if f"`{node}`" not in page]
