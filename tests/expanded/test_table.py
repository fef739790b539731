"""The docs list the rules that there are."""

from __future__ import annotations

from pathlib import Path

from tests.expanded.table import render

PAGE = Path(__file__).parents[2] / "docs" / "two-ways-in.md"


def test_the_table_in_the_docs_is_the_one_that_is_generated() -> None:
    assert render() in PAGE.read_text(), "run python -m tests.expanded.table and put its output into the page"
