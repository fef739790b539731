"""The benchmark package on tiny workloads: the real code path, from the command line to the JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import memory, run
from benchmarks.measure import Effort, Timing, check, measure
from benchmarks.methods import METHODS
from benchmarks.workloads import DEFAULT, TABLE, WORKLOADS, Task

TINY = ["tiny-cnn", "tiny-gpt"]


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    """The runner sets the number of threads of the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """What a run with two rounds writes and prints."""
    path = tmp_path / "bench.json"
    assert run.main(["--quick", "--threads", "1", "--rounds", "2", "--json", str(path), "--workloads", *TINY]) == 0
    return json.loads(path.read_text()), capsys.readouterr().out


def test_json_and_table(report: tuple[dict[str, Any], str]) -> None:
    written, printed = report
    assert set(written) == {"environment", "effort", "methods", "results"}
    assert {"torch", "threads", "cpu", "date", "commit", "source_changed"} <= set(written["environment"])
    assert written["environment"]["torch"] == torch.__version__
    assert written["environment"]["threads"] == 1
    assert set(written["methods"]) == set(METHODS)
    assert [r["workload"] for r in written["results"]] == TINY
    for result in written["results"]:
        _assert_result(result)
        assert re.search(rf"^{result['workload']} +{result['batch']} .*\d\.\d\d \(\d+\.\d\d\)", printed, re.MULTILINE)


def _assert_result(result: dict[str, Any]) -> None:
    assert result["batch"] == WORKLOADS[result["workload"]].batch
    assert result["parameters"] > 0
    assert result["graph_nodes"] > 10
    assert result["probed_nodes"] == 0, "an ordinary network needs no probe"
    assert result["warnings"] == [], "an ordinary network takes no slow path"
    assert result["rounds"] == 2
    assert result["others"] is None or result["others"] >= 0
    assert result["extra_bytes"] is None
    assert set(result["methods"]) == set(METHODS)
    for method in result["methods"].values():
        assert len(method["seconds"]) == 2
        assert 0 < method["ms"]["min"] <= method["ms"]["median"]
        assert set(method["ratio"]) == {"min", "median"}
    assert result["methods"]["plain"]["ratio"] == {"min": 1, "median": 1}


def test_ratios() -> None:
    seconds = {"plain": [1.0, 2.0, 4.0], "grad": [3.0, 2.0, 8.0]}
    timing = Timing(
        WORKLOADS["tiny-cnn"],
        parameters=1,
        nodes=1,
        probed=0,
        seconds=seconds,
        plain=dict.fromkeys(seconds, seconds["plain"]),
    )
    assert timing.ratio("grad") == {"min": 2.0, "median": 2.0}


def test_budget_ends_a_run() -> None:
    timing = measure(WORKLOADS["tiny-gpt"], Effort(rounds=1000, budget=0.0, fewest=1, warm_up=0))
    assert [len(times) for times in timing.seconds.values()] == [1] * len(METHODS)


def test_memory_is_taken_in_a_process_of_its_own() -> None:
    peaks = memory.peaks("tiny-gpt", threads=1, methods=["grad"])
    assert set(peaks) == {"activations", "grad"}
    assert all(0 <= value < 2**30 for value in peaks.values())


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match=r"false -m benchmarks\.memory tiny-gpt plain --threads 1 failed"):
        memory.peaks("tiny-gpt", threads=1)


def test_wrong_gradients_are_not_timed() -> None:
    task = WORKLOADS["tiny-cnn"].build()
    passes = iter([1.0, 2.0])
    crooked = Task(task.model, task.inputs, lambda *args: task.losses_fn(*args) * next(passes))
    with pytest.raises(ArithmeticError, match="do not add up"):
        check(crooked)


@pytest.mark.parametrize("workload", [w for w in TABLE if w.name in DEFAULT], ids=lambda w: w.name)
def test_workloads_give_one_loss_per_sample(workload: Any) -> None:
    losses = workload.build(batch=2).losses()
    assert losses.shape == (2,)
    assert losses.requires_grad


@pytest.mark.parametrize(("name", "millions"), [("mlp", 1.86), ("resnet", 2.8), ("gpt", 5.75), ("mlp-deep", 0.052)])
def test_workloads_have_the_sizes_they_are_known_by(name: str, millions: float) -> None:
    assert sum(p.numel() for p in WORKLOADS[name].model().parameters()) / 1e6 == pytest.approx(millions, rel=0.02)
