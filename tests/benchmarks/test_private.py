"""The benchmark of private steps: what is compared trains alike, and figures come out."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import private
from benchmarks.private import RATE, TRAINERS, Trainer, measured, take_turns
from benchmarks.reference import rows
from benchmarks.workloads import WORKLOADS

TINY = ["tiny-cnn", "tiny-gpt", "tiny-lstm"]


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    """The runner sets the number of threads of the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("workload", TINY)
@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda t: t.name)
def test_all_make_the_same_step_if_there_is_no_noise(
    trainer: Trainer, workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(trainer.needs)
    monkeypatch.setattr(private, "RATE", 1.0)  # a small step would be lost in float32 parameters
    task = WORKLOADS[workload].build()
    samples = list(rows(task))
    scales = [min(1.0, 1.0 / float(torch.cat([g.flatten() for g in row.values()]).norm())) for row in samples]
    if trainer.name == "plain":
        scales = [1.0] * len(scales)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = trainer.prepare(task, 0.0)
        run.step()
    for name, after in run.model.named_parameters():
        mean = sum(scale * row[name] for scale, row in zip(scales, samples, strict=True)) / len(samples)
        torch.testing.assert_close((task.params()[name] - after).detach(), mean, atol=2e-5, rtol=1e-3)
    assert all(p.grad is None for p in task.model.parameters())


@pytest.mark.parametrize("trainer", [t for t in TRAINERS if t.name in ("private", "insecure")], ids=lambda t: t.name)
def test_what_is_private_is_noisy(trainer: Trainer) -> None:
    task = WORKLOADS["tiny-gpt"].build()
    run = trainer.prepare(task, 1e3)
    run.step()
    moved = torch.cat([(p - q).flatten() for p, q in zip(run.model.parameters(), task.params().values(), strict=True)])
    expected = RATE * 1e3 / len(task.inputs[0])
    assert 0.9 < float(moved.detach().std()) / expected < 1.1  # of more than 7000 coordinates: 12 standard deviations
    assert moved.numel() > 7000


def test_turns_are_shared() -> None:
    calls: list[str] = []
    seconds = take_turns({name: lambda name=name: calls.append(name) for name in "ab"}, budget=0.0, fewest=4)  # type: ignore[misc]
    assert [len(times) for times in seconds.values()] == [4, 4]
    assert calls.count("a") == calls.count("b") == 3 + 2 * 4
    turns = calls[6:]
    assert turns[::2] == turns[1::2]  # one step that is not timed, one that is


def test_json_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "private.json"
    assert private.main(["--quick", "--threads", "1", "--workloads", "tiny-cnn", "--json", str(path)]) == 0
    written, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert {"torch", "threads", "cpu", "date", "commit"} <= set(written["environment"])
    assert [row["trainer"] for row in written["rows"]] == [t.name for t in TRAINERS]
    done = {row["trainer"]: row for row in written["rows"] if row["status"] == "ok"}
    assert {"plain", "clipped", "private", "insecure"} <= set(done)
    for row in done.values():
        assert row["samples_per_second"]["best"] >= row["samples_per_second"]["median"] > 0
        assert row["ratio"]["plain"]["median"] > 0
    assert done["clipped"]["ratio"]["clipped"]["median"] == 1
    assert done["private"]["noise_ms"]["min"] > 0
    assert done["private"]["parameters"] == 26010
    assert re.search(r"^tiny-cnn +4 +\d+ \(\d\.\d\d\)", printed, re.MULTILINE)


def test_what_is_not_installed_is_said_to_be_missing() -> None:
    absent = Trainer("absent", "nothing", TRAINERS[0].prepare, needs="no_such_package")
    found = measured("tiny-cnn", budget=0.0, fewest=1, trainers=[*TRAINERS[:3], absent])
    assert found[-1]["status"] == "missing"
    assert "no_such_package is not installed" in found[-1]["reason"]
