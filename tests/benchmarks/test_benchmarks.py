"""The benchmark package on tiny workloads: the real code path, from the command line to the JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import memory, processes, run, scaling, worker
from benchmarks.measure import Effort, Timing, spread, take_turns, whole_step
from benchmarks.methods import METHODS, OURS, PLAIN
from benchmarks.workloads import CURVES, DEFAULT, TABLE, WORKLOADS


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    """The runner sets the number of threads of the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers without the seconds that a process takes to start."""

    def run_worker(method: str, workloads: list[str], options: list[str], timeout: float) -> list[Any]:
        with redirect_stdout(StringIO()) as printed:
            worker.main([method, *workloads, *options])
        return processes.rows(printed.getvalue().encode())

    monkeypatch.setattr(run, "run_worker", run_worker)
    monkeypatch.setattr(worker, "forked", lambda function, *args: function(*args))


@pytest.mark.usefixtures("in_this_process")
def test_json_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, names = tmp_path / "new" / "bench.json", ["tiny-cnn", "tiny-gpt"]
    options = ["--quick", "--threads", "1", "--rounds", "2", "--no-memory", "--json", str(path)]
    assert run.main([*options, "--workloads", *names]) == 0
    written, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert {"torch", "threads", "cpu", "date", "commit", "source_changed"} <= set(written["environment"])
    assert written["environment"]["torch"] == torch.__version__
    assert written["environment"]["threads"] == 1
    assert list(written["workloads"]) == names
    assert list(written["methods"]) == OURS
    assert [(row["workload"], row["method"]) for row in written["rows"]] == [(w, m) for w in names for m in OURS]
    for row in written["rows"]:
        _assert_row(row)
    for name in names:
        assert re.search(rf"^{name} +{WORKLOADS[name].batch} .*\d\.\d\d \(\d+\.\d\d\)", printed, re.MULTILINE)


def _assert_row(row: dict[str, Any]) -> None:
    assert row["status"] == "ok"
    assert row["error"] < 1e-5
    assert row["parameters"] > 0
    assert row["rounds"] == 2
    assert row["others"] >= 0
    assert row["slow_paths"] == [], "an ordinary network takes no slow path"
    assert 0 < row["ms"]["min"] <= row["ms"]["q1"] <= row["ms"]["median"] <= row["ms"]["q3"]
    assert set(row["ratio"]) == {"min", "q1", "median", "q3"}


@pytest.mark.usefixtures("in_this_process")
def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scaling.json"
    monkeypatch.setattr(scaling, "LIMITS", {})  # one of memory would hold for the tests that follow
    options = ["--quick", "--threads", "1", "--rounds", "1", "--no-memory", "--points", "2", "--json", str(path)]
    assert scaling.main([*options, "--curves", "batch", "--methods", "plain", "norms"]) == 0
    written = json.loads(path.read_text())
    assert [(row["workload"], row["status"]) for row in written["rows"]] == [("batch-1", "ok"), ("batch-2", "ok")] * 2
    assert written["workloads"]["batch-2"]["value"] == 2
    assert "norms" in capsys.readouterr().out


@pytest.mark.usefixtures("in_this_process")
def test_sizes_beyond_a_long_step_are_left() -> None:
    options = ["--rounds", "1", "--threads", "1", "--longest", "0"]
    rows = run.measured("norms", ["batch-1", "batch-2"], options)
    assert [row["status"] for row in rows] == ["ok", "stopped"]


def test_a_ratio_is_taken_within_a_round() -> None:
    found = Timing(mine=[3.0, 2.0, 8.0], plain=[1.0, 2.0, 4.0]).as_json()
    assert found["ratio"] == {"min": 2.0, "q1": 1.5, "median": 2.0, "q3": 2.5}
    assert found["ms"]["min"] == 2000.0


def test_a_spread_of_one_value() -> None:
    assert spread([2.0]) == {"min": 2.0, "q1": 2.0, "median": 2.0, "q3": 2.0}


def test_budget_ends_a_run() -> None:
    plain = PLAIN.prepare(WORKLOADS["tiny-gpt"].build())
    timing = take_turns(plain, lambda: whole_step(plain), Effort(rounds=1000, budget=0.0, fewest=1, warm_up=0))
    assert len(timing.mine) == len(timing.plain) == 1


def test_memory_is_taken_in_a_process_of_its_own() -> None:
    peaks = memory.peaks("tiny-gpt", threads=1, methods=["grad"])
    assert set(peaks) == {"activations", "grad"}
    assert all(0 <= value < 2**30 for value in peaks.values())


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match=r"false -m benchmarks\.worker plain tiny-gpt --threads 1 .* failed"):
        memory.peaks("tiny-gpt", threads=1)


def test_a_crash_does_not_end_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    assert [row["status"] for row in run.measured("norms", ["batch-1", "batch-2"], [])] == ["crashed", "crashed"]


def test_a_process_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow, written = tmp_path / "slow", tmp_path / "written"
    rows = """echo '{"workload": "a", "status": "ok"}'; printf '{"workl'"""
    slow.write_text(f"#!/bin/sh\n{rows}; touch {written}; exec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    plain = subprocess.Popen.communicate

    def communicate(self: subprocess.Popen[bytes], timeout: float | None = None) -> tuple[bytes, bytes]:
        if timeout is None:
            return plain(self)
        while not written.exists():  # however long that takes
            time.sleep(0.01)
        return plain(self, timeout=0)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    assert processes.run_worker("norms", ["a", "b"], timeout=9.0) == [{"workload": "a", "status": "ok"}]


@pytest.mark.parametrize("workload", [w for w in TABLE if w.name in DEFAULT], ids=lambda w: w.name)
def test_workloads_give_one_loss_per_sample(workload: Any) -> None:
    losses = workload.build(batch=2).losses()
    assert losses.shape == (2,)
    assert losses.requires_grad


def test_curves_vary_one_size() -> None:
    for size, values in CURVES.items():
        assert [w.value for w in TABLE if w.group == size] == values
    assert WORKLOADS["batch-8"].build().losses().shape == (8,)
    assert WORKLOADS["length-64"].build().inputs[0].shape == (4, 65)
    assert WORKLOADS["width-128"].model().get_parameter("head.weight").shape == (256, 128)
    assert len(WORKLOADS["layers-4"].model().blocks) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "millions"), [("mlp", 1.86), ("resnet", 2.8), ("gpt", 5.75), ("mlp-deep", 0.052)])
def test_workloads_have_the_sizes_they_are_known_by(name: str, millions: float) -> None:
    assert sum(p.numel() for p in WORKLOADS[name].model().parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


def test_methods_are_told_apart() -> None:
    assert len({m.title for m in METHODS.values()}) == len(METHODS)
