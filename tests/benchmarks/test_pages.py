"""Tables and plots are what the stored figures give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables

PAGES = [tables.RESULTS.parent / "benchmarks.md", tables.ROOT / "README.md"]


def row(workload: str, method: str, ratio: float, **more: Any) -> dict[str, Any]:
    spread = {"min": ratio - 0.1, "median": ratio, "q1": ratio, "q3": ratio}
    return {"workload": workload, "method": method, "status": "ok", "ratio": spread, "ms": spread, **more}


@pytest.fixture
def report() -> tables.Report:
    return {
        "methods": {
            "plain": {"title": "plain step", "kind": "plain"},
            "norms": {"title": "ps.norms", "kind": "norms"},
            "backpack-norms": {"title": "BackPACK", "kind": "norms"},
        },
        "workloads": {
            name: {"title": name, "batch": n, "group": "batch", "value": n} for name, n in [("a", 1), ("b", 2)]
        },
        "rows": [
            row("a", "norms", 1.5, bytes={"activations": 1e6, "above": 2e6}),
            row("a", "backpack-norms", 2.5, bytes={"activations": 1e6, "above": 9e6}),
            row("b", "norms", 1.25),
            {"workload": "b", "method": "backpack-norms", "status": "fails", "reason": "no rule"},
        ],
    }


def test_ratios_become_a_table(report: tables.Report) -> None:
    assert tables.ratios(report, "norms").splitlines() == [
        "|  | `ps.norms` | BackPACK |",
        "| --- | ---: | ---: |",
        "| a | **1.50** (1.40) | 2.50 (2.40) |",
        "| b | **1.25** (1.15) | fails |",
    ]


def test_summary(report: tables.Report) -> None:
    for name, kind in (("clipped_sum", "clipped sums"), ("grad_out", "gradients"), ("grad", "gradients")):
        report["methods"][name] = {"title": f"ps.{name}", "kind": kind}
        report["rows"] += [row("a", name, 2.0), row("b", name, 3.0)]
    assert tables.summary(report).splitlines()[2:] == [
        "| a | 1.50 | 2.50 BackPACK | 2.00 | none | 2.00 | 2.00 | none |",
        "| b | 1.25 | none | 3.00 | none | 3.00 | 3.00 | none |",
    ]


def test_memory_and_growth(report: tables.Report) -> None:
    assert tables.memory(report).splitlines()[2:] == ["| a | – | 3 | 10 |", "| b | – | – | – |"]
    assert tables.growth(report, "batch").splitlines()[3:] == [
        "| `ps.norms` | 1.4 / 3 | 1.15 / – |",
        "| BackPACK | 2.4 / 10 | fails |",
    ]


def test_time_parts_add_up() -> None:
    ratios = {"forward": 0.4, "plan": 0.05, "bare": 0.3, "capture": 0.5, "norms": 1.2}
    report = {
        "methods": dict.fromkeys(["plain", *ratios]),
        "workloads": {"a": {}},
        "rows": [row("a", method, ratio) for method, ratio in ratios.items()],
    }
    assert tables.time_parts(report).splitlines()[2] == "| a | 0.40 | 0.60 | 0.30 | 0.05 | 0.15 | 0.30 | 1.20 |"


def test_failures(report: tables.Report) -> None:
    assert tables.failures([report]) == "- BackPACK, fails: no rule (b)\n"
    assert tables.failures([]) == "None.\n"


def test_only_what_is_between_markers_changes() -> None:
    page = "before\n<!-- begin clipped sums -->\nold\n<!-- end clipped sums -->\nafter\n"
    filled = tables.filled(page, {"clipped sums": "new\n"})
    assert filled == "before\n<!-- begin clipped sums -->\nnew\n<!-- end clipped sums -->\nafter\n"
    assert tables.filled(filled, {"clipped sums": "new\n"}) == filled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_stored_figures(page: Path) -> None:
    text = page.read_text()
    assert len(tables.MARKED.findall(text)) == text.count("<!-- begin")
    assert tables.filled(text, tables.all_tables(*tables.load())) == text, "run `make bench-pages`"


def test_plots_are_the_same_from_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    stored = [str(tables.RESULTS / name) for name in ("peers.json", "scaling.json")]
    drawn = []
    for folder in (tmp_path / "1", tmp_path / "2"):
        plots.main([*stored, "--out", str(folder)])
        drawn.append([(folder / name).read_text() for name in ("peers.svg", "scaling.svg")])
    assert drawn[0] == drawn[1]
    assert "<svg" in drawn[0][0]
