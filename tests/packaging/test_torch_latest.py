"""What `make test-torch-latest` decides to test, and that it says so."""

from __future__ import annotations

import re
import sys

import pytest

from tests.packaging import torch_latest
from tests.packaging.torch_latest import decide, pinned, public

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, torch from PyPI is a CPU build")


def test_the_pin_is_read() -> None:
    assert public(pinned()) == pinned()
    assert pinned()[0].isdigit()


@pytest.mark.parametrize(
    ("on_index", "cpu", "cuda", "install", "said"),
    [
        (None, None, False, None, "No package index could be asked for torch: nothing was tested"),
        ("2.13.0", "2.13.0+cpu", False, None, r"newest torch is 2\.13\.0, the pinned one: `make test` tests it"),
        ("2.13.0", None, False, None, r"is 2\.13\.0, the pinned one"),
        (None, "2.13.0+cpu", True, None, r"is 2\.13\.0\+cpu, the pinned one"),
        (
            "2.14.0",
            "2.14.0+cpu",
            False,
            "2.14.0+cpu",
            r"is 2\.14\.0, and 2\.14\.0\+cpu a CPU build of it; pinned is 2\.13",
        ),
        ("2.15.0", None, True, "2.15.0", r"newest torch is 2\.15\.0; pinned is 2\.13\.0"),
        pytest.param("2.15.0", "2.14.0+cpu", False, "2.14.0+cpu", r"2\.14\.0\+cpu is the newest CPU", marks=ON_LINUX),
        pytest.param("2.15.0", "2.13.0+cpu", False, None, r"nothing was tested\. CUDA=1 make", marks=ON_LINUX),
        pytest.param("2.15.0", None, False, None, r"newest torch is 2\.15\.0, and pinned is 2\.13\.0", marks=ON_LINUX),
    ],
)
def test_what_is_tested(on_index: str | None, cpu: str | None, cuda: bool, install: str | None, said: str) -> None:
    found = decide("2.13.0", on_index, cpu, cuda)
    assert found.install == install
    assert re.search(said, found.said)
    assert found.fine == ("pinned one" in found.said)


@pytest.mark.parametrize(("version", "status"), [(pinned(), 0), (None, 1)])
def test_nothing_is_installed_without_need(
    version: str | None, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_latest, "newest", lambda *_, **__: version)
    monkeypatch.setattr(torch_latest.venv, "create", lambda *_, **__: pytest.fail("made an environment"))
    assert torch_latest.main(["--venv", "unused"]) == status
    assert ("no more was run" if version else "nothing was tested") in capsys.readouterr().out
