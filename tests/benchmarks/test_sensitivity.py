"""How far one sample moves a private sum: the figures are what they are said to be."""

from __future__ import annotations

import pytest

from benchmarks.sensitivity import PRECISIONS, TASKS, Setting, main, measured


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("task", TASKS)
def test_no_sample_moves_a_sum_by_more_than_the_bound(task: str, precision: str) -> None:
    for samples, at_a_time in ((3000, 3000), (300, 7)):
        found, _ = measured(Setting(task, precision, samples, at_a_time))
        assert 0.95 < found <= 1


def test_sums_in_floating_point_do() -> None:
    """The data do what they are meant to: otherwise the test above says nothing."""
    found, floats = measured(Setting("scale", "float32", 1024, 1))
    assert floats > 1.01
    assert found <= 1


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--samples", "8192"]) == 0
    said = capsys.readouterr().out
    assert said.count("8192") >= len(TASKS) * len(PRECISIONS)
    assert "the most that one sample moves: 0.9" in said
