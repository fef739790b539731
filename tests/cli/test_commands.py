"""The command line: what is printed where, exit codes, files, and what is said when something is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import persample
from persample.audit import EXIT_CODES
from persample.audit.models import MODELS
from tests.cli.command import Run, Shell

MODEL = "persample.audit.models:mlp"
FILE = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
def each(output): return output.square().sum(1)
def good(batch_size=4):
    print("made by the user")
    return nn.Linear(3, 2), torch.randn(batch_size, 3), each
def interacting():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.randn(4, 3), each
def refused():
    class Forgetful(nn.Linear):
        def forward(self, x):
            noisy = lambda x: nn.functional.dropout(nn.functional.linear(x, self.weight, self.bias))
            return checkpoint(noisy, x.requires_grad_(), use_reentrant=True, preserve_rng_state=False)
    return Forgetful(3, 2), torch.randn(4, 3), each
def unknown():
    weights = torch.ones(4)
    return nn.Linear(3, 2), torch.randn(4, 3), lambda output: each(output) * weights
def deep():
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(40)]), torch.randn(4, 3), each
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command: exit code, stdout and stderr."""
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.setenv("COLUMNS", "80")
    return Shell(capsys, monkeypatch, tmp_path)


CODES = {"good": 0, "interacting": 3, "refused": 4, "unknown": 5}


@pytest.mark.parametrize("name", CODES)
def test_the_exit_code_is_the_verdict(run: Run, name: str) -> None:
    code, out, err = run("audit", f"mine.py:{name}", "--repeats", "0", "--quiet")
    assert code == CODES[name]
    assert out == f"{EXIT_CODES[code]} (exit code {code})\n"
    assert ("made by the user" in err) == (name == "good")


def test_a_wrong_gradient_is_exit_code_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(losses: torch.Tensor, params: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {name: 2 * rows for name, rows in persample.grad(losses, params).items()}

    monkeypatch.setattr("persample.testing.compare.grad", wrong)
    code, out, _ = run("audit", "mine.py:good", "--repeats", "0")
    assert code == 1
    assert "WRONG" in out


def test_the_table_answers_every_question(run: Run) -> None:
    code, out, _ = run("audit", MODEL, "--repeats", "2", "--batch-size", "4")
    assert code == 0
    for words in (
        "does it work?",
        "6 by rule",
        "independent by the graph?",
        "0.weight",
        "clipped_sum",
        "to plain",
        "MB",
    ):
        assert words in out
    assert "made by" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out  # no colours where nobody looks


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_tables_fit(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for spec in ("mine.py:interacting", "mine.py:refused", "mine.py:deep"):
        _, out, _ = run("audit", spec, "--repeats", "1", "--no-memory")
        assert max(map(len, out.splitlines())) <= columns


def test_large_models_are_shown_in_part(run: Run) -> None:
    _, out, _ = run("audit", "mine.py:deep", "--repeats", "0")
    assert len(re.findall(r"^ \d+\.(?:weight|bias) ", out, re.MULTILINE)) == 30
    assert "50 more, all exact and by rule (--all shows them)" in " ".join(out.split())
    _, out, _ = run("audit", "mine.py:deep", "--repeats", "0", "--all")
    assert len(re.findall(r"^ \d+\.(?:weight|bias) ", out, re.MULTILINE)) == 80


def test_json_goes_to_stdout_alone(run: Run) -> None:
    for argv in (["audit", "mine.py:good", "--json"], ["audit", "--json", "mine.py:good"]):
        code, out, err = run(*argv, "--repeats", "1", "--no-memory")
        assert code == 0
        data = json.loads(out)
        assert data["independent"] is True
        assert data["batch"] == 4
        assert data["environment"]["torch"] == torch.__version__
        assert "made by the user" in err


def test_json_and_html_go_to_files(run: Run) -> None:
    code, out, _ = run("audit", "mine.py:interacting", "--json", "a.json", "--html", "a.html", "--repeats", "1", "-q")
    assert code == 3
    assert out.startswith("samples interact")
    assert json.loads(Path("a.json").read_text())["exit_code"] == 3
    page = Path("a.html").read_text()
    assert not re.search(r"(?:src|href)=|url\(|https?://|@import", page)  # nothing is asked of the network
    for words in ("mine.py:interacting", "samples interact", "NativeBatchNorm", "0.weight", "clipped_sum", "persample"):
        assert words in page


def test_html_is_well_formed(run: Run) -> None:
    """Every tag is closed in order, and what users name is escaped."""
    Path("odd.py").write_text(
        "import torch\nfrom torch import nn\nnet = nn.Module()\n"
        "net.register_parameter('a<b>&', nn.Parameter(torch.ones(3)))\n"
        "def losses(model, x): return x @ model.get_parameter('a<b>&')\n"
        "def factory(): return net, torch.randn(4, 3), losses\n"
    )
    run("audit", "odd.py", "--html", "a.html", "--repeats", "1", "--no-memory", "-q")
    page = Path("a.html").read_text()
    assert "a&lt;b&gt;&amp;" in page
    assert "a<b>" not in page

    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag != "meta":
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    tags = Tags()
    tags.feed(page)
    assert tags.open == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["audit", "mine.py:missing"], "mine.py has no 'missing'"),
        (["bench", "mine.py:missing"], "mine.py has no 'missing'"),
        (["audit", "mine.py:good", "--device", "nowhere"], "device 'nowhere' cannot be used here"),
        (["audit", "mine.py:good", "-b", "1"], "the batch has 1 sample"),
        (["audit", "mine.py:deep", "-b", "2"], "takes no argument batch_size"),
        (["audit", "mine.py:good", "--json=no/where.json"], "cannot be written: there is no directory no"),
        (["audit", "mine.py:good", "--html", "."], ". is a directory: name a file in it"),
        (["audit", "mine.py:good", "--repeats", "-1"], "--repeats"),
        (["audit", "mine.py:good", "-b", "0"], "--batch-size"),
        (["audit"], "SPEC"),
        (["nothing"], "nothing"),
    ],
)
def test_wrong_use_is_exit_code_two(run: Run, argv: list[str], message: str) -> None:
    code, out, err = run(*argv)
    assert code == 2
    assert message in " ".join(err.split())
    assert out == ""


def test_names_are_not_taken_for_markup(run: Run) -> None:
    _, _, err = run("audit", "[bold]mine.py:x")
    assert "[bold]mine.py" in err


def test_bench_times_built_in_models_and_others(run: Run) -> None:
    code, out, _ = run("bench", "--repeats", "1", "--batch-size", "2")
    assert code == 0
    for words in (*MODELS, "plain step", "norms", "clipped_sum", "grad", "loop"):
        assert words in out
    threads = torch.get_num_threads()
    try:
        code, out, _ = run("bench", "mine.py:good", "mlp", "--repeats", "2", "--threads", "1", "--json")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    data = json.loads(out)
    assert [(m["name"], m["batch"], m["parameters"]) for m in data["models"]] == [
        ("mine.py:good", 4, 8),
        ("mlp", 64, 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10),
    ]
    assert data["models"][0]["costs"][0]["rounds"] == 2
    code, out, _ = run("bench", "mlp", "--repeats", "1", "-b", "2", "--json", "b.json")
    assert "mlp" in out
    assert json.loads(Path("b.json").read_text())["models"][0]["batch"] == 2


def test_version_says_what_is_installed(run: Run) -> None:
    code, out, _ = run("version")
    assert code == 0
    for words in (persample.__version__, torch.__version__, "threads", "cpu capability", "devices"):
        assert words in out
    _, out, _ = run("version", "--json")
    data = json.loads(out)
    assert data["persample"] == persample.__version__
    assert data["threads"] == torch.get_num_threads()
    assert data["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert data["devices"][0] == "cpu"
    assert run("--version")[1] == f"persample {persample.__version__}\n"


def test_packages_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from persample.cli import facts

    monkeypatch.setattr(facts, "_OPTIONAL", ("not-a-package",))
    assert facts.facts()["packages"] == {"not-a-package": None}


def test_help_names_the_forms_and_the_exit_codes(run: Run) -> None:
    code, out, _ = run("audit", "--help")
    assert code == 0
    assert "(model, inputs, targets, loss): loss(output, targets)" in out
    for number, meaning in EXIT_CODES.items():
        assert f"{number} = {meaning}" in out
    code, out, _ = run("--help")
    assert all(name in out for name in ("audit", "bench", "version", "demo"))


def test_the_page_lists_the_exit_codes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    for number, meaning in EXIT_CODES.items():
        assert f"| {number} | {meaning} |" in page


def test_the_demo_is_given_its_arguments(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def main(argv: list[str]) -> int:
        seen.append(argv)
        return 1

    monkeypatch.setattr("persample.demo.main", main)
    code, _, _ = run("demo", "--quick", "--out", "x.html", "--help")
    assert code == 1
    assert seen == [["--quick", "--out", "x.html", "--help"]]


def test_what_the_demo_misses_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(persample, "demo", raising=False)
    monkeypatch.setitem(sys.modules, "persample.demo", None)
    code, _, err = run("demo")
    assert code == 2
    assert "pip install 'persample[demo]'" in err


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_a_missing_package_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    code, out, err = run("version")
    assert (code, out) == (2, "")
    assert err == (f"persample: the command line needs {name}, not installed here: pip install 'persample[cli]'\n")


def test_it_runs_as_a_module_and_the_library_imports_neither_typer_nor_rich() -> None:
    env = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    code = "import sys, persample, persample.audit; print([m for m in ('typer', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout == "[]\n"
    done = subprocess.run([sys.executable, "-m", "persample", "version"], capture_output=True, text=True, env=env)
    assert done.returncode == 0
    assert persample.__version__ in done.stdout
