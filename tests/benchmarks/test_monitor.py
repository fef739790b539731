"""The benchmark of `ps.Monitor` runs, and its page shows what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import monitor
from benchmarks.tables import MARKED, RESULTS
from benchmarks.workloads import WORKLOADS

PAGE = RESULTS.parent / "monitor.md"


def test_all_ways_give_the_same_gradients(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    task, found = WORKLOADS["tiny-cnn"].build(), []
    for backward in [monitor.plain, *monitor.ways(task, str(tmp_path)).values()]:
        backward(task.losses())
        found.append([p.grad for p in task.model.parameters()])
        task.model.zero_grad()
    assert len(found) == 3
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    page, path = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text("before\n<!-- begin monitor -->\nold\n<!-- end monitor -->\nafter\n")
    options = ["--rounds", "1", "--threads", "1", "--json", str(path), "--page", str(page)]
    assert monitor.main(["--workloads", "tiny-cnn", *options]) == 0
    table = monitor.table(json.loads(path.read_text()))
    assert page.read_text() == f"before\n<!-- begin monitor -->\n{table}<!-- end monitor -->\nafter\n"
    assert "| tiny-cnn |" in table
    assert table in capsys.readouterr().out


def test_the_page_shows_the_stored_figures() -> None:
    report = json.loads((RESULTS / "monitor.json").read_text())
    (found,) = MARKED.finditer(PAGE.read_text())
    assert found[0] == f"{found['begin']}{monitor.table(report)}{found['end']}"
