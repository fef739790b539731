"""The table of expected errors is what plans say."""

from __future__ import annotations

import pytest

from benchmarks import correlated
from benchmarks.correlated import MECHANISMS, Setting, accuracy, errors, main, trials

SMALL = Setting(2000, 100, 2, 8.0)


def test_a_row_holds_the_errors_of_plans() -> None:
    row = errors(SMALL)
    base = SMALL.plan().expected_error
    assert row[:3] == ["100 of 2000, 2 epochs", "8", f"{base:.3g}"]
    assert len(row) == 3 + len(MECHANISMS)
    assert f"{SMALL.plan(mechanism='banded').expected_error / base:.2f}" in row[4]
    assert any("**" in cell for cell in row[3:])


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlated, "SETTINGS", [SMALL])
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| plan | epsilon | DP-SGD: error | " + " | ".join(MECHANISMS) + " |"
    assert len(lines) == 3


@pytest.mark.filterwarnings("ignore::persample.dp.PrivacyWarning")
def test_digits_are_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlated, "RATES", (2.0,))
    monkeypatch.setattr(correlated, "TRIALS", {"DP-SGD": {}})
    setting = Setting(1437, 200, 2, 8.0)
    assert accuracy(setting.plan(mechanism="banded", delta=1e-5), 2.0, 0) > 0.6
    monkeypatch.setattr(correlated, "Setting", lambda *_: setting)
    ((epsilon, name, _, rate, reached),) = trials(8.0, 1)
    assert (epsilon, name, rate) == ("8", "DP-SGD", "2")
    assert float(reached.split("%")[0]) > 60
