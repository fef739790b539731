"""The benchmark of several losses per sample runs, its ways agree, and its page shows what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import several
from benchmarks.tables import MARKED, RESULTS

SMALL = {
    "tokens-apart": {"width": 4, "batch": 3, "length": 2},
    "logits": {"width": 4, "batch": 3, "classes": 2},
    "jacobian": {"width": 4, "batch": 3, "classes": 2},
    "tokens-of-gpt": {"width": 4, "layers": 1, "batch": 2, "length": 3},
}
PAGE = RESULTS.parent / "several.md"


@pytest.mark.parametrize("name", several.TASKS)
def test_ways_to_the_same_numbers_agree(name: str) -> None:
    torch.manual_seed(0)
    task = several.TASKS[name](**SMALL[name])
    norms = [way() for title, way in task.ways.items() if "norms" in title]
    for other in norms:
        torch.testing.assert_close(other, norms[0])
    written: list[dict[str, Tensor]] = [
        way() for title, way in task.ways.items() if "jac" in title and "norm" not in title
    ]
    for each in written:
        torch.testing.assert_close(dict(each), dict(written[0]))
    assert norms or written


def test_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "TASKS", {"logits": lambda: several.logits(**SMALL["logits"])})
    page, path = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text("before\n<!-- begin several -->\nold\n<!-- end several -->\nafter\n")
    assert several.main(["--rounds", "1", "--json", str(path), "--page", str(page)]) == 0
    table = several.table(json.loads(path.read_text()))
    assert page.read_text() == f"before\n<!-- begin several -->\n{table}<!-- end several -->\nafter\n"
    assert "| logits, MLP of width 4, (3, 2) | ps.gram |" in table


def test_the_page_shows_the_stored_figures() -> None:
    report = json.loads((RESULTS / "several.json").read_text())
    (found,) = MARKED.finditer(PAGE.read_text())
    assert found[0] == f"{found['begin']}{several.table(report)}{found['end']}"
