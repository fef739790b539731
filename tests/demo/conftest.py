"""One quick run for all tests that look at its results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from persample.demo.findings import Findings
from persample.demo.progress import Parts
from persample.demo.report import render
from persample.demo.run import find
from persample.demo.settings import QUICK


@dataclass(frozen=True)
class Quick:
    """What was found, and the page made from it."""

    found: Findings
    page: str
    path: Path


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Quick:
    found = find(QUICK, 0, Parts(Console(quiet=True)))
    path = tmp_path_factory.mktemp("demo") / "report.html"
    path.write_text(render(found), encoding="utf-8")
    return Quick(found, path.read_text(encoding="utf-8"), path)
