"""The docs list the rules of the engine that there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from persample.graph.ops.table import entries
from tests.graph.names import NO_OPS, NODES
from tests.graph.ops_page import PAGE, render

PINNED = (Path(__file__).parents[2] / "constraints.txt").read_text()


PINNED_ONLY = pytest.mark.skipif(
    f"torch=={torch.__version__.split('+')[0]}\n" not in PINNED, reason="nodes are those of the torch that is pinned"
)


@PINNED_ONLY
def test_the_page_is_the_one_that_is_generated() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.graph.ops_page"


def test_every_entry_is_listed() -> None:
    page = PAGE.read_text()
    assert not [op.name for op in entries() if f"`{op.name}`" not in page]


@PINNED_ONLY
def test_every_node_of_this_torch_is_listed() -> None:
    page = PAGE.read_text()
    assert not [name for name in NODES - NO_OPS if f"`{name}`" not in page]
