"""What `make test-torch` decides to test, and that it says so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.packaging import torch_release
from tests.packaging.torch_release import command, constraints, counted, decide, pinned, public

INDEX = ["2.15.0", "2.14.1", "2.13.0", "2.10.0"]


def test_the_pin_is_read() -> None:
    assert public(pinned()) == pinned()
    assert pinned()[0].isdigit()


def test_other_packages_are_pinned_and_not_what_torch_decides_on() -> None:
    kept = {line.partition("==")[0] for line in constraints().splitlines() if "==" in line}
    assert {"transformers", "pytest", "numpy"} <= kept
    assert not {"torch", "sympy", "setuptools", "typing_extensions", "Jinja2"} & kept


@pytest.mark.parametrize(
    ("wanted", "on_index", "cpu", "install", "said"),
    [
        ("newest", [], [], None, "No package index could be asked for torch: nothing was tested"),
        ("newest", INDEX[2:], ["2.13.0+cpu"], None, r"newest torch is 2\.13\.0, the pinned one: `make test` tests it"),
        ("newest", [], ["2.13.0+cpu"], None, r"is 2\.13\.0, the pinned one"),
        ("newest", INDEX, ["2.13.0+cpu"], "2.15.0", r"Testing torch 2\.15\.0, of which no CPU build was found; pinned"),
        ("newest", INDEX, ["2.15.0+cpu", "2.13.0+cpu"], "2.15.0+cpu", r"Testing 2\.15\.0\+cpu, a CPU build; pinned is"),
        ("2.10.0", INDEX, [], "2.10.0", r"Testing torch 2\.10\.0"),
        ("2.14.1", INDEX, ["2.14.1+cpu"], "2.14.1+cpu", r"Testing 2\.14\.1\+cpu"),
        ("2.13.0", INDEX, [], "2.13.0", r"Testing torch 2\.13\.0.* pinned is 2\.13\.0"),
        ("2.10.0", [], [], "2.10.0", r"Testing torch 2\.10\.0"),
        ("2.77.0", INDEX, [], None, r"There is no torch 2\.77\.0 among 2\.15\.0, .* nothing was tested"),
    ],
)
def test_what_is_tested(wanted: str, on_index: list[str], cpu: list[str], install: str | None, said: str) -> None:
    found = decide(wanted, "2.13.0", on_index, cpu)
    assert found.install == install
    assert re.search(said, found.said)
    assert found.fine == ("the pinned one" in found.said)


@pytest.mark.parametrize(("versions", "status"), [([pinned()], 0), ([], 1)])
def test_nothing_is_installed_without_need(
    versions: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_release, "available", lambda *_, **__: versions)
    monkeypatch.setattr(torch_release.venv, "create", lambda *_, **__: pytest.fail("made an environment"))
    assert torch_release.main([]) == status
    assert ("no more was run" if versions else "nothing was tested") in capsys.readouterr().out


REPORT = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'


@pytest.mark.parametrize(
    ("numbers", "said"),
    [((24113, 0, 0, 13), "24,100 passed, 0 failed, 13 skipped"), ((9, 2, 1, 0), "6 passed, 3 failed, 0 skipped")],
)
def test_what_was_run_is_counted(numbers: tuple[int, ...], said: str, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(*numbers))
    assert counted(report) == said


@pytest.mark.parametrize("status", [0, 1])
def test_a_release_is_run_and_told(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With pip, the environment and pytest made up."""
    ran: list[tuple[list[str], dict[str, Any]]] = []

    def run(words: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
        ran.append(([str(word) for word in words], options))
        if "pytest" in words:
            report = tmp_path / "build" / "test-torch-2.15.0.xml"
            report.parent.mkdir()
            report.write_text(REPORT.format(12, status, 0, 1))
            return subprocess.CompletedProcess(words, status)
        return subprocess.CompletedProcess(words, 0, stdout="torch 2.15.0+cu132 on Python 3.11.7\n")

    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((torch_release.ROOT / name).read_text())
    monkeypatch.setattr(torch_release, "ROOT", tmp_path)
    monkeypatch.setattr(torch_release, "available", lambda *_, alone=False: [] if alone else INDEX)
    monkeypatch.setattr(torch_release.venv, "create", lambda folder, **_: folder.mkdir(exist_ok=True))
    monkeypatch.setattr(torch_release.subprocess, "run", run)
    assert torch_release.main(["--torch", "2.15.0", "--tests", "tests/graph -k 'names or saved'"]) == status
    last = capsys.readouterr().out.splitlines()[-1]
    passed = f"{11 - status} passed, {status} failed, 1 skipped"
    pin = pinned()
    assert last == (
        f"torch 2.15.0+cu132 on Python 3.11.7: {passed} (of tests/graph -k 'names or saved'); pinned is {pin}."
    )
    install, _, (asked, options) = ran
    assert {"torch==2.15.0", f"{tmp_path}[test]"} <= set(install[0])
    assert asked[-3:] == ["tests/graph", "-k", "names or saved"]
    assert options["env"]["OMP_NUM_THREADS"] == "1"
    ran.clear()
    (tmp_path / "build" / "test-torch-2.15.0.xml").unlink()
    (tmp_path / "build").rmdir()
    torch_release.main(["--torch", "2.15.0"])
    assert len(ran) == 2  # installed already


def test_the_tests_are_those_of_make_test() -> None:
    makefile = (torch_release.ROOT / "Makefile").read_text()
    words = " ".join(str(word) for word in command(Path("python"), Path("report.xml"), "")[3:-1])
    options, marks = words.split(" -m ")
    assert f"-m pytest {options}\n" in makefile
    assert f"$(PYTEST) -m '{marks}'\n" in makefile
