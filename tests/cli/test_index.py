"""`persample index`: what each command writes and prints, and what is said about everything that can be wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import persample
from persample import influence as pi
from persample.cli import output
from persample.cli.output import Stages
from persample.cli.refusals import EXIT_CODES
from persample.influence.store import files
from tests.cli.command import Run, Shell
from tests.cli.studies import FILE, loaded


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command in a folder with a file of studies: exit code, stdout and stderr."""
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.setenv("COLUMNS", "80")
    return Shell(capsys, monkeypatch, tmp_path)


@pytest.fixture
def built(run: Run) -> Run:
    """The same, with an index."""
    assert run("index", "build", "mine.py:good", "-f", "idx")[0] == 0
    return run


def of(run: Run, *argv: str) -> Any:
    """The JSON that a command prints."""
    code, out, err = run("index", *argv, "--json")
    assert code == 0, err
    return json.loads(out)


def test_build_says_what_there_is_and_goes_on(run: Run) -> None:
    code, out, err = run("index", "build", "mine.py:good", "--folder", "idx")
    assert (code, out) == (0, f"20 examples in idx: 24 numbers each, {out.rpartition(', ')[2]}")
    assert "made by the user" in err
    told = of(run, "build", "mine.py:good", "-f", "idx")
    assert (told["examples"], told["numbers"], told["dtype"], told["per_token"]) == (20, 24, "float32", False)
    assert told["sketch"] == {"kind": "blocks", "left": 3, "right": 3, "seed": 0}
    assert told["bytes"] > 20 * 24 * 4
    assert told["environment"]["torch"] == torch.__version__


def test_what_is_built_is_what_the_library_builds(run: Run) -> None:
    run(
        "index",
        "build",
        "mine.py:good",
        "-f",
        "idx",
        "--blocks",
        "2xall",
        "--dtype",
        "int8",
        "--parameters",
        "0.weight",
    )
    study = loaded("mine.py:good")
    own = pi.Index("own", study.model, study.losses_fn, sketch=pi.Blocks(2, None), dtype="int8", params=["0.weight"])
    own.build(study.loader)
    torch.testing.assert_close(study.open_index("idx").scores(study.queries), own.scores(study.queries))


@pytest.mark.parametrize("spec", ["good", "several"])
def test_query_gives_the_hits_of_the_library(built: Run, spec: str) -> None:
    found = of(built, "query", f"mine.py:{spec}", "-f", "idx", "-k", "3")
    study = loaded("mine.py:good")
    index = study.open_index("idx")
    assert [q["query"] for q in found["queries"]] == [0, 1, 2, 3]
    for order in ("helpful", "harmful"):
        want = index.query(study.queries, 3, order=order)  # type: ignore[arg-type]
        assert [[hit["id"] for hit in q[order]] for q in found["queries"]] == want.ids.tolist()
        scores = torch.tensor([[hit["score"] for hit in q[order]] for q in found["queries"]])
        torch.testing.assert_close(scores, want.scores)
    assert (found["k"], found["examples"], found["curvature"]) == (3, 20, False)


def test_query_options_reach_the_library(built: Run) -> None:
    plain = of(built, "query", "mine.py:good", "-f", "idx", "--order", "helpful")["queries"][0]
    assert "harmful" not in plain
    assert len(plain["helpful"]) == 10
    cosines = of(built, "query", "mine.py:good", "-f", "idx", "--normalise")["queries"][0]
    assert max(abs(hit["score"]) for hit in cosines["helpful"]) <= 1.0001
    shares = of(built, "query", "mine.py:good", "-f", "idx", "--per", "parameter")["queries"][0]["helpful"][0]
    assert list(shares["by_parameter"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert sum(shares["by_parameter"].values()) == pytest.approx(shares["score"], rel=1e-4)
    one = of(built, "query", "mine.py:good", "-f", "idx", "--parameters", "0.weight, 2.bias")["queries"][0]["helpful"][
        0
    ]
    assert one["score"] != pytest.approx(plain["helpful"][0]["score"])


def test_query_prints_tables_that_fit(built: Run) -> None:
    code, out, _ = built("index", "query", "mine.py:good", "-f", "idx", "-k", "2")
    assert code == 0
    for words in ("query 0", "label", "helpful", "harmful", "row ", "<b>&", "4 queries, 2 of 20 examples each"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80
    assert "made by the user" not in out
    assert "\x1b" not in out
    assert built("index", "query", "mine.py:good", "-f", "idx", "-q")[1] == "4 queries, 10 of 20 examples each\n"


def test_many_queries_are_shown_in_part(run: Run) -> None:
    Path("many.py").write_text(FILE + "\ndef many(): return study(queries=(X[:7], Y[:7]), show_query=None)\n")
    run("index", "build", "many.py:many", "-f", "idx")
    _, out, _ = run("index", "query", "many.py:many", "-f", "idx", "-k", "1")
    assert len(re.findall(r"^query \d", out, re.MULTILINE)) == 5
    assert "2 more queries (--all shows them; --html makes a page)" in out
    _, out, _ = run("index", "query", "many.py:many", "-f", "idx", "-k", "1", "--all")
    assert len(re.findall(r"^query \d", out, re.MULTILINE)) == 7


def test_tokens(run: Run) -> None:
    run("index", "build", "mine.py:tokens", "-f", "idx")
    hits = of(run, "query", "mine.py:tokens", "-f", "idx", "--per", "token", "-k", "20")["queries"][1]["helpful"]
    assert len(hits) == 20  # of 24 tokens, though there are 6 examples
    assert {hit["token"] for hit in hits} <= set(range(4))
    _, out, _ = run("index", "query", "mine.py:tokens", "-f", "idx", "--per", "token", "--html", "h.html")
    assert "token" in out
    assert len(re.findall(r'<mark class="good level-\d" title="\+', Path("h.html").read_text())) >= 2


class Tags(HTMLParser):
    """That all tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_of_a_query(built: Run) -> None:
    code, out, _ = built(
        "index", "query", "mine.py:good", "-f", "idx", "-k", "2", "--html", "h.html", "--json", "h.json"
    )
    assert code == 0
    assert "query 0" in out
    page, told = Path("h.html").read_text(), json.loads(Path("h.json").read_text())
    best = told["queries"][0]["helpful"][0]["id"]
    for words in (
        "persample index: mine.py:good",
        "Query 3",
        "Most harmful",
        f"row {best} &lt;b&gt;&amp;",
        f"id {best}",
    ):
        assert words in page
    assert "<b>&" not in page
    tags = Tags()
    tags.feed(page)
    assert tags.open == []


def test_fit_stands_between_the_gradients(built: Run) -> None:
    code, out, _ = built("index", "fit", "mine.py:good", "-f", "idx", "--damping", "0.5")
    assert (code, out) == (0, "curvature shampoo, given labels, for 20 examples in idx\n")
    study = loaded("mine.py:good")
    scores = study.open_index("idx").scores(study.queries)
    own = study.new_index("own").build(study.loader).fit(pi.Shampoo(), damping=0.5)
    torch.testing.assert_close(scores, own.scores(study.queries))
    assert of(built, "query", "mine.py:good", "-f", "idx")["curvature"]
    for name in ("kfac", "covariance", "adam"):
        assert of(built, "fit", "mine.py:good", "-f", "idx", "--curvature", name)["curvature"] == name
        assert not torch.allclose(study.open_index("idx").scores(study.queries), scores)
    assert built("index", "fit", "mine.py:good", "-f", "idx", "--curvature", "none")[1].startswith("no curvature")
    assert study.open_index("idx").fitted() is None


def test_labels_are_sampled_by_the_study(built: Run) -> None:
    built("index", "fit", "mine.py:good", "-f", "idx", "--labels", "sampled")
    study = loaded("mine.py:good")
    sampled = study.open_index("idx").scores(study.queries)
    built("index", "fit", "mine.py:good", "-f", "idx")
    assert not torch.allclose(study.open_index("idx").scores(study.queries), sampled)


def test_select_is_that_of_the_library(built: Run) -> None:
    study = loaded("mine.py:good")
    index = study.open_index("idx")
    want = pi.select(index, study.queries, count=3)
    for spec in ("good", "several"):
        found = of(built, "select", f"mine.py:{spec}", "-f", "idx", "--count", "3", "--ids", "ids.txt")
        assert found["ids"] == want.ids.tolist()
        assert Path("ids.txt").read_text() == "".join(f"{i}\n" for i in found["ids"])
    found = of(built, "select", "mine.py:unasked", "-f", "idx", "--method", "mislabelled", "--fraction", "0.2")
    assert found["ids"] == pi.select(index, fraction=0.2, method="mislabelled").ids.tolist()
    found = of(built, "select", "mine.py:good", "-f", "idx", "--method", "diverse", "--no-queries", "--fraction", "0.1")
    want = pi.select(index, fraction=0.1, method="diverse")
    assert (found["ids"], found["weights"]) == (want.ids.tolist(), pytest.approx(want.weights.tolist()))  # type: ignore[union-attr]
    matched = of(built, "select", "mine.py:good", "-f", "idx", "--method", "diverse", "--count", "4")
    assert matched["ids"] == pi.select(index, index.vectors(study.queries), count=4, method="diverse").ids.tolist()
    code, out, _ = built("index", "select", "mine.py:good", "-f", "idx")
    assert (code, out.splitlines()[-1]) == (0, "1 of 20 examples, by top")


def test_ids_are_those_of_the_study(run: Run) -> None:
    run("index", "build", "mine.py:named", "-f", "idx")
    data = torch.cat([x for x, _ in loaded("mine.py:named").loader])
    ids = set((100 * data[:, 0]).long().tolist())
    assert {hit["id"] for hit in of(run, "query", "mine.py:named", "-f", "idx")["queries"][0]["helpful"]} <= ids
    assert set(of(run, "select", "mine.py:named", "-f", "idx")["ids"]) <= ids


def test_check_compares_with_the_definition(built: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (["-f", "idx"], [], ["--blocks", "2x2"]):
        code, out, _ = built("index", "check", "mine.py:good", *options)
        assert code == 0
        assert "exact: largest error" in out
        assert "int8" in out
    told = of(built, "check", "mine.py:good")
    assert told["exact"]
    assert told["worst"] < told["tolerance"] == pytest.approx(500 * 2**-23)
    assert built("index", "check", "mine.py:good", "--tolerance", "0", "-q")[1].startswith("WRONG: largest error")
    right = pi.Blocks.of_stack
    monkeypatch.setattr(pi.Blocks, "of_stack", lambda *given: 1.01 * right(*given))
    code, out, _ = built("index", "check", "mine.py:good", "-f", "idx", "-q")
    assert code == 1
    assert out.startswith("WRONG: largest error 2.0e-02")


def test_export_writes_rows_and_vectors(built: Run) -> None:
    code, out, _ = built("index", "export", "mine.py:good", "-f", "idx", "--out", "r.npy", "--vectors", "q.npy")
    assert (code, out) == (0, "20 examples in r.npy\n")
    study = loaded("mine.py:good")
    scores = study.open_index("idx").scores(study.queries)
    numpy.testing.assert_allclose(numpy.load("q.npy") @ numpy.load("r.npy").T, scores, rtol=1e-4, atol=1e-6)


def test_a_device_is_where_batches_go(built: Run) -> None:
    code, _, err = built("index", "build", "mine.py:good", "-f", "meta", "--device", "meta")
    assert code == 2
    assert "meta" in err
    assert of(built, "query", "mine.py:good", "-f", "idx", "--device", "cpu")["examples"] == 20


WRONG = [
    (["build", "mine.py:missing", "-f", "idx"], 2, "mine.py has no 'missing'"),
    (["build", "nowhere.py", "-f", "idx"], 2, "there is no file nowhere.py"),
    (["build", "mine.py:good"], 2, "--folder"),
    (["build", "mine.py:good", "-f", "mine.py"], 2, "mine.py is a file: name a folder for the index"),
    (["build", "mine.py:good", "-f", "."], 2, "choose an empty folder, or a new one"),
    (["build", "mine.py:good", "-f", "new", "--blocks", "16"], 2, "--blocks must be two positive numbers (or all)"),
    (["build", "mine.py:good", "-f", "new", "--blocks", "0x3"], 2, "as in 16x16, not '0x3'"),
    (
        ["build", "mine.py:good", "-f", "new", "--parameters", "head"],
        2,
        "no trainable parameters of the model: ['head']",
    ),
    (["build", "mine.py:good", "-f", "new", "--dtype", "float8"], 2, "--dtype"),
    (["build", "mine.py:good", "-f", "new", "--device", "nowhere"], 2, "device 'nowhere' cannot be used here"),
    (["build", "mine.py:good", "-f", "new", "--json=no/where.json"], 2, "there is no directory no"),
    (["build", "mine.py:good", "-f", "idx", "--blocks", "2x2"], 3, "holds an index of something else: sketch or seed"),
    (["build", "mine.py:other", "-f", "idx"], 3, "other parameters or buffers in checkpoint 0"),
    (["build", "mine.py:broken", "-f", "new"], 2, "TypeError: tuple indices must be integers"),
    (["build", "mine.py:scalar", "-f", "new"], 2, "losses_fn must return losses of shape (B,)"),
    (["build", "mine.py:empty", "-f", "new"], 2, "the loader has no batches"),
    (["build", "mine.py:good", "-f", "/proc/nothing"], 4, "could not be written"),
    (["fit", "mine.py:good", "-f", "new"], 2, "new holds no index: persample index build makes one"),
    (["fit", "mine.py:unsampled", "-f", "idx", "--labels", "sampled"], 2, "--labels sampled needs sample_losses_fn"),
    (["fit", "mine.py:unasked", "-f", "idx", "--curvature", "adam"], 2, "--curvature adam needs the optimizer"),
    (["fit", "mine.py:good", "-f", "idx", "--curvature", "newton"], 2, "--curvature"),
    (["fit", "mine.py:good", "-f", "idx", "--damping", "-1"], 2, "--damping"),
    (["query", "mine.py:good", "-f", "."], 2, ". holds no index"),
    (["query", "mine.py:unasked", "-f", "idx"], 2, "there are no queries: let the factory return a batch"),
    (["query", "mine.py:none_to_ask", "-f", "idx"], 2, "there are no queries: the loader of queries is empty"),
    (["query", "mine.py:good", "-f", "idx", "-k", "21"], 2, "--k must be from 1 to 20, the number of examples, not 21"),
    (["query", "mine.py:good", "-f", "idx", "-k", "0"], 2, "--k"),
    (["query", "mine.py:good", "-f", "idx", "--per", "token"], 2, "this index has no tokens"),
    (["query", "mine.py:good", "-f", "idx", "--per", "parameter", "--normalise"], 2, "pass normalise=False"),
    (["query", "mine.py:good", "-f", "idx", "--parameters", "head"], 2, "that the index does not have: ['head']"),
    (["query", "mine.py:good", "-f", "idx", "--parameters", ""], 2, "parameters are empty: name at least one"),
    (["query", "mine.py:left", "-f", "idx"], 2, "SystemExit: 0 (mine.py, line"),
    (["query", "mine.py:other", "-f", "idx"], 3, "was built with other parameters or buffers"),
    (["query", "mine.py:tokens", "-f", "idx"], 3, "was built with parameters that the model does not have"),
    (["query", "mine.py:unseen", "-f", "idx"], 2, "KeyError: 'column' (mine.py, line"),
    (["query", "mine.py:good", "-f", "idx", "--html", "."], 2, ". is a directory: name a file in it"),
    (["query", "mine.py:good", "-f", "idx", "--html", "/proc/h.html"], 2, "/proc/h.html cannot be written"),
    (["select", "mine.py:unasked", "-f", "idx"], 2, "there are no queries"),
    (["select", "mine.py:good", "-f", "idx", "--fraction", "2"], 2, "fraction must be above 0 and at most 1, not 2.0"),
    (["select", "mine.py:good", "-f", "idx", "--count", "21"], 2, "count must be from 0 to 20"),
    (["select", "mine.py:good", "-f", "idx", "--count", "2", "--fraction", ".5"], 2, "--fraction and --count both say"),
    (["check", "mine.py:good", "-f", "idx", "--blocks", "2x2"], 2, "--blocks is known of an index"),
    (["check", "mine.py:empty"], 2, "the loader has no batches"),
    (["export", "mine.py:good", "-f", "idx", "--out", "r.txt"], 2, "format must be one of 'npy', 'parquet', 'faiss'"),
    (["export", "mine.py:good", "-f", "idx", "--out", "no/r.npy"], 2, "there is no directory no"),
    (["nothing"], 2, "nothing"),
]


@pytest.mark.parametrize(("argv", "code", "message"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_what_is_wrong_is_told_in_one_line(built: Run, argv: list[str], code: int, message: str) -> None:
    got, out, err = built("index", *argv)
    assert (got, out) == (code, "")
    assert message in " ".join(err.replace("│", " ").split())
    lines = [line for line in err.splitlines() if line != "made by the user"]
    assert len(lines) == 1 or "Usage:" in err
    assert "Traceback" not in err


def test_damage_is_told(built: Run) -> None:
    chunk = next(Path("idx/chunks").iterdir())
    content = bytearray(chunk.read_bytes())
    content[-1] ^= 1
    chunk.write_bytes(content)
    code, _, err = built("index", "check", "mine.py:good", "-f", "idx")
    assert code == 3
    assert "has changed since it was written" in err
    Path("idx/index.json").write_text("{")
    code, _, err = built("index", "query", "mine.py:good", "-f", "idx")
    assert code == 3
    assert "is damaged" in err


def _changed(*place: str, value: object) -> None:
    told = json.loads(Path("idx/index.json").read_text())
    inner = told
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    Path("idx/index.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("samples",), "abc"),
        (("samples",), [None]),
        (("curvature",), [{"kind": "unknown", "file": "none"}]),
        (("curvature",), 3),
        (("plan",), []),
        (("plan", "parameters"), 5),
        (("plan", "dtype"), "float2"),
        (("plan", "checkpoints"), [3]),
        (("plan", "sketch"), {"kind": "unknown"}),
        (("plan", "sketch"), {"kind": "blocks", "size": 3}),
    ],
    ids=str,
)
def test_an_index_that_says_nonsense_is_damaged(built: Run, place: tuple[str, ...], value: object) -> None:
    _changed(*place, value=value)
    code, _, err = built("index", "query", "mine.py:good", "-f", "idx")
    assert code == 3
    assert len([line for line in err.splitlines() if line != "made by the user"]) == 1


def test_an_index_that_is_no_text_is_damaged(built: Run) -> None:
    Path("idx/index.json").write_bytes(b"\xff\xfe\x00")
    code, _, err = built("index", "query", "mine.py:good", "-f", "idx")
    assert code == 3
    assert "is damaged" in err


def test_a_build_that_stopped_is_not_complete_and_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("persample.influence.build.of_batch", stop)
        code, _, err = run("index", "build", "mine.py:good", "-f", "idx")
    assert code == 130
    assert "stopped" in err
    with monkeypatch.context() as patched:
        patched.setattr("persample.influence.build.Builder._finish", stop)
        assert run("index", "build", "mine.py:good", "-f", "idx")[0] == 130
    code, _, err = run("index", "query", "mine.py:good", "-f", "idx")
    assert code == 2
    assert "is not complete" in err
    assert run("index", "build", "mine.py:good", "-f", "idx")[0] == 0
    assert run("index", "query", "mine.py:good", "-f", "idx")[0] == 0


def test_a_full_disk_is_exit_code_four(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.Path, "open", full)
    code, _, err = run("index", "build", "mine.py:good", "-f", "idx")
    assert code == 4
    assert "the disk is full: make room" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no file that is always full")
@pytest.mark.parametrize(
    "argv", [["query", "--html", "/dev/full"], ["query", "--json=/dev/full"], ["select", "--ids", "/dev/full"]]
)
def test_an_answer_that_cannot_be_written_is_exit_code_four(built: Run, argv: list[str]) -> None:
    code, _, err = built("index", argv[0], "mine.py:good", "-f", "idx", *argv[1:])
    assert code == 4
    assert (
        err.strip().splitlines()[-1]
        == f"persample index {argv[0]}: /dev/full could not be written: No space left on device"
    )


def test_a_disk_that_is_full_when_rows_are_exported(built: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("numpy.lib.format.write_array_header_1_0", full)
    code, _, err = built("index", "export", "mine.py:good", "-f", "idx", "--out", "rows.npy")
    assert code == 4
    assert "No space left on device" in err


def test_help_names_what_spec_gives_and_the_exit_codes(run: Run) -> None:
    code, out, _ = run("index", "--help")
    assert code == 0
    text = " ".join(out.split())
    for words in ("losses_fn(model, batch)", "show_query(i)", "sample_losses_fn", "retrain"):
        assert words in text
    for number, meaning in EXIT_CODES.items():
        assert f"{number} = {meaning}" in text
    for name in ("build", "fit", "query", "select", "check", "export"):
        code, out, _ = run("index", name, "--help")
        assert code == 0
        assert f"persample index {name} persample.influence.examples:digits" in " ".join(out.split())
    assert "index" in run("--help")[1]


def test_the_page_lists_the_exit_codes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "influence.md").read_text()
    for number, meaning in EXIT_CODES.items():
        assert f"| {number} | {meaning} |" in page


@pytest.mark.slow
def test_processes_build_together(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(persample.__file__).parents[1])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["persample", "index", "build", "mine.py:good", "-f", "idx", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["examples"] == 20


def test_a_query_shows_how_much_of_the_index_it_has_read(built: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In terminals; one stage for each order."""
    seen: list[float] = []

    class Watched(Stages):
        def share(self, done: float) -> None:
            super().share(done)
            seen.append(self._bar.tasks[0].completed)

    monkeypatch.setattr(output, "Stages", Watched)
    assert built("index", "query", "mine.py:good", "-f", "idx")[0] == 0
    assert seen[-1] == 2
    assert 1 in seen
    assert seen == sorted(seen)
