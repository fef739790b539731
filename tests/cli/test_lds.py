"""`persample lds`: the score of the library, kept results, other processes, plots and mistakes."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from persample import influence as pi
from tests.cli.command import Run, Shell
from tests.cli.studies import FILE, loaded


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command in a folder with a file of studies: exit code, stdout and stderr."""
    (tmp_path / "mine.py").write_text(FILE)
    return Shell(capsys, monkeypatch, tmp_path)


def test_the_score_is_that_of_the_library(run: Run) -> None:
    code, out, err = run("lds", "mine.py:good", "--subsets", "6", "--drop", "0.2", "--seeds", "2")
    assert code == 0
    study = loaded("mine.py:good")
    assert study.retrain is not None
    index = study.new_index("own").build(study.loader).fit(pi.Shampoo())
    with redirect_stdout(sys.stderr):
        want = pi.lds(index.scores(study.queries), study.retrain, subsets=6, drop=0.2, seeds=(0, 1))
    assert out == f"{want}: 4 queries, 6 subsets without 20% of 20 examples\n"
    assert "trained by the user" in err
    run("index", "build", "mine.py:good", "-f", "idx")
    run("index", "fit", "mine.py:good", "-f", "idx")
    argv = ("lds", "mine.py:good", "--index", "idx", "--subsets", "6", "--drop", "0.2", "--seeds", "2")
    told = json.loads(run(*argv, "--json")[1])
    assert told["score"] == pytest.approx(want.score)
    assert told["interval"] == pytest.approx(want.interval)
    assert (told["queries"], told["examples"], len(told["per_query"])) == (4, 20, 4)
    other = json.loads(run(*argv, "--subset-seed", "1", "--json")[1])
    assert other["per_query"] != told["per_query"]


def test_nothing_is_trained_twice(run: Run) -> None:
    argv = ("lds", "mine.py:good", "--subsets", "3", "--drop", "0.2", "--folder", "kept")
    _, first, err = run(*argv)
    assert err.count("trained by the user") == 3
    _, again, err = run(*argv)
    assert err.count("trained by the user") == 0
    assert again == first
    assert len(list(Path("kept").iterdir())) == 3


def test_examples_go_by_the_ids_of_the_study(run: Run) -> None:
    Path("ids.py").write_text(
        FILE
        + "\nNAMES = torch.arange(20).flip(0) + 100\n"
        + "def by_name(ids, seed): return retrain(torch.tensor([int((NAMES == i).nonzero()) for i in ids]), seed)\n"
        + "def factory():\n"
        + "    batches = zip(X.split(8), Y.split(8), NAMES.split(8))\n"
        + "    return study(loader=list(batches), ids_fn=lambda batch: batch[2], retrain=by_name)\n"
    )
    argv = ("--subsets", "4", "--drop", "0.2")
    assert run("lds", "ids.py", *argv)[1] == run("lds", "mine.py:good", *argv)[1]


@pytest.mark.slow
def test_other_processes_load_the_study_for_themselves(run: Run) -> None:
    """A file's functions, and lambdas, which cannot be pickled."""
    Path("closed.py").write_text(FILE + "\ndef factory(): return study(retrain=lambda ids, seed: retrain(ids, seed))\n")
    argv = ("--subsets", "4", "--drop", "0.2")
    assert run("lds", "closed.py", *argv, "--workers", "2")[:2] == run("lds", "mine.py:good", *argv)[:2]


def test_a_plot(run: Run) -> None:
    pytest.importorskip("matplotlib")
    run("lds", "mine.py:good", "--subsets", "3", "--drop", "0.2", "--plot", "lds.png", "-q")
    assert Path("lds.png").read_bytes()[:4] == b"\x89PNG"


def test_a_plot_needs_matplotlib(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persample.cli.lds.find_spec", lambda name: None)
    code, out, err = run("lds", "mine.py:good", "--plot", "lds.png")
    assert (code, out) == (2, "")
    assert "--plot needs matplotlib, not installed here: pip install 'persample[bench]'" in err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["mine.py:missing"], 2, "mine.py has no 'missing'"),
        (["mine.py:unasked"], 2, "there are no queries"),
        (["mine.py:good", "--index", "nowhere"], 2, "nowhere holds no index"),
        (["mine.py:good", "--index", "nowhere", "--curvature", "kfac"], 2, "an index is as it was built and fitted"),
        (["mine.py:good", "--subsets", "2"], 2, "--subsets"),
        (["mine.py:good", "--drop", "1.5"], 2, "drop=1.5 of 20 examples must leave out at least one"),
        (["mine.py:good", "--folder", "mine.py"], 2, "mine.py is a file: name a folder for results"),
        (["mine.py:good", "--plot", "no/lds.png"], 2, "there is no directory no"),
        (["mine.py:walking_out"], 2, "SystemExit: 0 (mine.py, line"),
        (["mine.py:untrainable"], 2, "ZeroDivisionError: division by zero (mine.py, line"),
        (["mine.py:untrained"], 2, "there is no retrain: let the factory return retrain(ids, seed)"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(run: Run, argv: list[str], code: int, message: str) -> None:
    with Path("mine.py").open("a") as file:
        file.write("\ndef untrained(): return study(retrain=None)\n")
    got, out, err = run("lds", *argv)
    assert (got, out) == (code, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_help_has_an_example(run: Run) -> None:
    code, out, _ = run("lds", "--help")
    assert code == 0
    assert "persample lds persample.influence.examples:digits" in " ".join(out.split())


CONSTANT = {
    "losses": ("retrain=lambda ids, seed: QY * 0.0", "what retrain returns for a query is the same for all subsets"),
    "scores": (
        "losses_fn=lambda model, batch: 0 * losses_fn(model, batch)",
        "what scores predict for a query is the same for all subsets",
    ),
}


@pytest.mark.parametrize("kind", CONSTANT)
def test_where_nothing_differs_there_is_no_score(run: Run, kind: str) -> None:
    """Losses that no example changes have no ranks."""
    changed, message = CONSTANT[kind]
    Path("constant.py").write_text(f"from mine import *\ndef factory(): return study({changed})\n")
    argv = ("lds", "constant.py:factory", "--subsets", "3", "--drop", "0.2", "--curvature", "none")
    code, out, err = run(*argv, "--plot", "lds.png")
    assert (code, out) == (1, "")
    assert f"persample lds: there is no score: {message}" in err
    assert not Path("lds.png").exists()
    code, out, _ = run(*argv, "--json")
    assert code == 1
    told = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert told["score"] is None
    assert set(told["per_query"]) == {None}
