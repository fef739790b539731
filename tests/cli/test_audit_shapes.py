"""The audit of models without numbers: what they would cost, from shapes, and what cannot be known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from persample.audit import EXIT_CODES, Report, audit
from persample.audit.costs import PLAIN
from tests.cli.command import Run, Shell

FILE = """
import torch
from torch import nn
def each(output): return output.square().sum(1)
def factory():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(16, 64), each
def chosen():
    with torch.device("meta"):
        order = torch.randperm(16)
        return nn.Linear(64, 32), torch.randn(16, 64), lambda output: each(output[order])
"""


def each(output: Tensor) -> Tensor:
    return output.square().sum(1)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))


def report(kind: str, model: nn.Module | None = None, repeats: int = 1) -> Report:
    if kind == "meta":
        with torch.device("meta"):
            return audit(model or net(), torch.randn(16, 64), each, repeats=repeats)
    with FakeTensorMode():
        made, x = model or net(), torch.randn(16, 64)
    return audit(made, x, each, repeats=repeats)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_costs_are_estimated_from_shapes(kind: str) -> None:
    found = report(kind)
    assert (found.works, found.has_numbers, found.exit_code, found.ok) == (True, False, 6, False)
    assert found.coverage() == {"rule": 4}
    assert (found.graph.answer, found.rerun.answer) == ("independent", "unknown")
    numbers = 64 * 32 + 32 + 32 * 8 + 8
    assert (found.parameter_bytes, found.stack_bytes) == (4 * numbers, 16 * 4 * numbers)
    estimates = {one.name: one for one in found.estimates}
    plain, written = estimates[PLAIN], estimates["grad"]
    products = 2 * 16 * (64 * 32 + 32 * 8)
    assert plain.flops == products + products + 2 * 16 * 32 * 8  # forward, weights, and the inner layer's input
    assert plain.ratio == 1.0
    assert written.bytes_above is not None
    assert 0.9 * found.stack_bytes < written.bytes_above < 1.5 * found.stack_bytes  # activations go meanwhile
    assert plain.bytes_above is not None
    assert plain.bytes_above < written.bytes_above
    assert found.activations == 4 * 16 * (32 + 8 + 1)  # what tanh and the last layer gave, and the losses


def test_the_report_says_what_could_not_be_known() -> None:
    text = str(report("meta"))
    assert text.splitlines()[-1] == EXIT_CODES[6]
    assert "step         operations  to plain  memory above forward" in text
    assert "note: gradients were not compared with the definition, nor time measured" in text
    data = json.loads(json.dumps(report("meta").as_dict()))
    assert [one["name"] for one in data["estimates"]] == [PLAIN, "norms", "clipped_sum", "grad"]


def test_costs_are_left_out_if_not_asked_for() -> None:
    assert report("meta", repeats=0).estimates == ()


def test_samples_that_interact_are_seen_all_the_same() -> None:
    with torch.device("meta"):
        found = report("meta", nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4)))
    assert (found.graph.answer, found.exit_code) == ("interacting", 3)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(capsys, monkeypatch, tmp_path)


def test_the_command_says_what_could_not_be_known(run: Run) -> None:
    code, out, _ = run("audit", "mine.py", "--html", "page.html")
    assert code == 6
    assert "From shapes alone: parameters take 9.2 kB" in out
    assert "nor time measured: the tensors have no numbers" in out
    assert "Costs, from shapes alone" in Path("page.html").read_text()
    code, out, _ = run("audit", "mine.py:chosen", "--repeats", "0")
    assert code == 6
    assert "note: data decide where samples lie in Index: taken to meet there" in out
    assert "decided by data: unknown without it" in out


def test_there_is_nothing_to_time(run: Run) -> None:
    code, _, err = run("bench", "mine.py")
    assert code == 2
    assert "persample audit estimates its costs from shapes" in " ".join(err.split())
