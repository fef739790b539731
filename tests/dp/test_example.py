"""The example trains to what it promises."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "private_digits.py"


def test_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(EXAMPLE))["main"]() == 0
    said = capsys.readouterr().out
    accuracy = re.search(r"test accuracy ([\d.]+)%", said)
    spent = re.search(r"epsilon ([\d.]+) at delta 1e-05 after \d+ steps\n$", said)
    assert accuracy is not None
    assert spent is not None
    assert float(accuracy[1]) >= 90
    assert 2.9 < float(spent[1]) <= 3.0
