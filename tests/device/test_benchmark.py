"""`python -m benchmarks.launches`: counts, times and tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import launches, tables


def test_json_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, threads = tmp_path / "launches.json", torch.get_num_threads()
    try:
        launches.main(["--workloads", "tiny-cnn", "--host", "tiny-gpt", "--rounds", "2", "--json", str(path)])
    finally:
        torch.set_num_threads(threads)
    report, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert [row["method"] for row in report["rows"]] == list(launches.VERBS)
    assert all(row["launches"] > 0 for row in report["rows"])
    assert report["host"][0]["nodes"] > 20
    assert tables.launch_counts(report) in printed
    assert tables.host_time(report) in printed


def test_counts_become_a_table() -> None:
    verbs = {
        "plain": (10, {}),
        "norms": (15, {}),
        "clipped_sum": (20, {"item": 1}),
        "grad": (12, {"equal": 2, "item": 1}),
    }
    report = {
        "methods": {verb: {"title": f"ps.{verb}"} for verb in verbs},
        "workloads": {"a": {}},
        "rows": [{"workload": "a", "method": v, "launches": n, "waits": waits} for v, (n, waits) in verbs.items()],
    }
    assert tables.launch_counts(report).splitlines()[2] == "| a | 10 | 1.50 | 2.00, 1 wait | 1.20, 3 waits |"


def test_times_become_a_table() -> None:
    spread = {"min": 1.0, "q1": 2.0, "median": 3.0, "q3": 4.0}
    report = {"host": [{"workload": "a", "nodes": 7, "read": spread, "capture": spread, "plain": spread}]}
    assert tables.host_time(report).splitlines()[2].startswith("| a | 7 | 3.0 (2.0 to 4.0) |")
