"""`python -m persample.testing.device`: what it says where all is well, and where it is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from persample import shortcuts, verbs
from persample.testing.device import examine, usable
from persample.testing.device.__main__ import main
from persample.testing.device.answers import Check, Wrong, answers
from persample.testing.device.hard import hard_numbers
from persample.testing.device.run import Findings, Line, _run
from persample.testing.device.work import work
from tests.device.backend import DEVICE, no_float64, raise_refused

CPU = torch.device("cpu")


def test_the_cpu_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    status = main(["cpu", "--quick", "--json", str(path)])
    printed, written = capsys.readouterr(), json.loads(path.read_text())
    assert status == 0, printed.out
    assert written["ok"] is True
    assert written["environment"]["torch"] == torch.__version__
    assert {line["status"] for line in written["lines"]} == {"ok"}
    for line in written["lines"]:
        assert line["name"] in printed.out
    assert "all ok" in printed.out
    assert "PERSAMPLE_DEVICE=cpu python -m pytest tests/device" in printed.out
    assert f"[{len(written['lines'])}/{len(written['lines'])}]" in printed.err


def test_the_strict_device_passes() -> None:
    findings = examine(DEVICE, quick=True)
    raise_refused()
    assert findings.ok, str(findings)
    sections = {line.section for line in findings.lines}
    assert {"gradients, float64", "autocast, float16", "hard numbers", "layouts", "launches and waits"} <= sections
    counted = {line.name: line.remark for line in findings.lines if line.section == "launches and waits"}
    assert "waits: none" in counted["gpt block: norms"]
    assert "waits: _local_scalar_dense 1" in counted["gpt block: clipped_sum"]


def test_devices_without_float64_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what only repeats: launches and times."""
    for module in [m for name, m in sys.modules.items() if name.startswith("persample")]:
        for question in ("has_float64", "has_fast_float64"):
            if hasattr(module, question):
                monkeypatch.setattr(module, question, lambda device: device.type == "cpu")
    monkeypatch.setattr("persample.testing.device.run.work", lambda device, quick: ())
    with no_float64():
        findings = examine(DEVICE)
    raise_refused()
    assert findings.ok, str(findings)
    assert findings.environment["float64"] == "none"
    assert "gradients, float32" in {line.section for line in findings.lines}


def lines_of(*names: str) -> list[Line]:
    """The lines of checks with these words."""
    checks = [*answers(CPU), *hard_numbers(CPU), *work(CPU, quick=True)]
    return [_run(check) for check in checks if any(name in check.name for name in names)]


def test_a_broken_verb_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    true = shortcuts.norms
    monkeypatch.setattr(shortcuts, "norms", lambda *args, **options: 1.01 * true(*args, **options))
    monkeypatch.setattr("persample.testing.device.run.work", lambda device, quick: ())
    status, printed = main(["cpu"]), capsys.readouterr().out
    assert status == 1
    assert "WRONG   mlp: norms" in printed
    assert "error 1.0e-02, more than 2e-04" in printed
    assert "ok      mlp: clipped_sum" in printed
    assert "NOT ok" in printed


def test_a_verb_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no such kernel\nand a long explanation")

    monkeypatch.setattr(shortcuts, "gram", fail)
    for line in lines_of(": gram"):
        assert (line.status, line.remark) == ("failed", "RuntimeError: no such kernel")


def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = verbs.grad
    monkeypatch.setattr("persample.testing.compare.grad", lambda *args: {n: 2 * g for n, g in true(*args).items()})
    (line,) = [line for line in lines_of("gru") if line.section.startswith("gradients")]
    assert line.status == "WRONG"
    assert "differs from the definition by 1.0e+00" in line.remark


def test_a_nan_that_is_overlooked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shortcuts, "clipped_sum", lambda losses, model, bound, **options: dict(model.named_parameters())
    )
    (line,) = lines_of("NaN is named")
    assert (line.status, line.remark) == ("WRONG", "no NonFiniteError was raised")


def test_waits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = shortcuts.norms

    def looks(*args: Any) -> Any:
        norms = true(*args)
        return norms if bool(norms.isfinite().all()) else None

    monkeypatch.setattr(shortcuts, "norms", looks)
    check = next(check for check in work(DEVICE, quick=True) if check.name == "mlp: norms")
    line = _run(check)
    assert line.status == "WRONG"
    assert line.remark.endswith("more than 0")


def test_long_errors_are_cut() -> None:
    def fail() -> str:
        raise Wrong("x") if not text else RuntimeError(text)

    text = "y" * 1000
    assert len(_run(Check("a", "b", fail)).remark) < 300


@pytest.mark.parametrize(
    ("name", "why"),
    [("nonsense", "'nonsense' is no device of PyTorch"), ("meta", "have no numbers"), ("mtia", "no work can be done")],
)
def test_devices_that_are_not_there(name: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=why):
        usable(name)
    with pytest.raises(SystemExit) as left:
        main([name])
    assert left.value.code == 2
    assert why in capsys.readouterr().err


def test_the_report_has_a_place_to_go_to(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cpu", "--json", "/no/such/folder/report.json"])
    assert "there is no folder /no/such/folder" in capsys.readouterr().err


def test_a_report_says_what_is_not_ok() -> None:
    bad = Line("hard numbers", "zeros", "WRONG", "error 1")
    findings = Findings({"device": "cuda:0"}, (Line("layouts", "cnn", "ok", ""), bad))
    assert not findings.ok
    assert "2 checks: 1 NOT ok" in str(findings)
    assert "  WRONG  hard numbers; zeros: error 1" in str(findings)
