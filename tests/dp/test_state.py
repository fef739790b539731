"""Saved and resumed runs: killed anywhere, the spent budget never goes backward and no noise is drawn again."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import persample as ps
from persample import dp
from tests.dp.crash import STEPS, WHERE
from tests.dp.helpers import WIDTH, dataset, flat, losses_of, network, plan, private
from tests.models import mlp

ROOT = Path(__file__).parents[2]


def train(trained: dp.Private, steps: int) -> None:
    for batch in trained.batches(dataset(), steps=steps):
        trained.step(losses_of(trained._model, batch))


def test_killed_and_resumed(tmp_path: Path) -> None:
    """Killed in the fourth step, or while saving after it, then resumed to the end."""
    command = [sys.executable, "-m", "tests.dp.crash", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert not done.stderr
    ends = json.loads(done.stdout)
    assert list(ends) == WHERE
    for where, ((first, status), (second, last_status)) in ends.items():
        begun = {"nowhere": STEPS, "before account": 3}.get(where, 4)  # counted when the second process begins
        released = {"nowhere": STEPS, "before account": 3, "torn journal": 3, "after account": 3}.get(where, 4)
        assert status == (0 if where == "nowhere" else -signal.SIGKILL), where
        assert last_status == 0, where
        assert first[0] == "begins at 0", where
        assert second[0] == f"begins at {begun}", where
        assert second[-1] == f"ends at {STEPS}", where
        noises = [[line for line in said if line[0] not in "be"] for said in (first, second)]
        assert [len(n) for n in noises] == [released, STEPS - begun], where
        assert len(set(noises[0]) | set(noises[1])) == released + STEPS - begun, f"{where}: noise was drawn twice"


def test_a_run_goes_on_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    model = network()
    trained = private(model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9)))
    train(trained, 3)
    trained.save(path)
    model2 = mlp(WIDTH, 7, 3, dtype=torch.float32, seed=9)
    optimizer2 = torch.optim.Adam(model2.parameters(), lr=7.0)
    resumed = private(model2, optimizer=optimizer2)
    resumed.resume(path)
    assert torch.equal(flat(model), flat(model2))
    assert resumed.spent() == trained.spent()
    assert optimizer2.param_groups[0]["lr"] == 0.1
    assert optimizer2.param_groups[0]["betas"] == (0.8, 0.9)
    for p, q in zip(model.parameters(), model2.parameters(), strict=True):
        torch.testing.assert_close(trained._optimizer.state[p], optimizer2.state[q])
    train(resumed, 10)
    assert resumed.steps == 6


def test_the_file_holds_no_pickle_and_no_secret(tmp_path: Path) -> None:
    trained = private(seed=123456789)
    trained.save(tmp_path / "run")
    data = (tmp_path / "run").read_bytes()
    assert b"123456789" not in data
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(data)
    json.loads((tmp_path / "run.journal").read_text().splitlines()[0])


def test_tied_weights_are_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight
    trained = private(model)
    trained.save(tmp_path / "run")
    with torch.no_grad():
        model[0].weight += 1
    before = model[0].weight.detach().clone()
    trained.resume(tmp_path / "run")
    torch.testing.assert_close(model[1].weight, before - 1)


def test_an_older_file_counts_what_the_journal_has_seen(tmp_path: Path) -> None:
    trained = private()
    train(trained, 1)
    trained.save(tmp_path / "old")
    train(trained, 2)
    (tmp_path / "later").mkdir()
    trained.save(tmp_path / "later" / "new")
    train(trained, 1)
    resumed = private()
    resumed.resume(tmp_path / "old")
    assert resumed.steps == trained.steps == 4
    train(resumed, 1)
    with pytest.raises(dp.PrivacyError, match=r"names a journal in another folder, '../old.journal'"):
        private().resume(tmp_path / "later" / "new")
    last = private(journal=tmp_path / "old.journal")
    last.resume(tmp_path / "later" / "new")
    assert last.steps == 5
    train(last, 1)
    assert list(last.batches(dataset())) == []


def test_resuming_draws_new_noise_and_new_samples() -> None:
    state = private().state_dict()
    ends = []
    for _ in range(2):
        resumed = private()
        resumed.load_state_dict(state)
        train(resumed, 1)
        ends.append(flat(resumed._model))
    fresh = private()
    train(fresh, 1)
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], flat(fresh._model))


def test_states_are_json_and_never_go_back() -> None:
    trained = private(clip=dp.AdaptiveClip(initial=0.4))
    train(trained, 2)
    state = json.loads(json.dumps(trained.state_dict()))
    train(trained, 2)
    bound = trained.bound
    trained.load_state_dict(state)
    assert trained.steps == 4
    assert trained.bound == state["bound"] != bound
    other = private(clip=dp.AdaptiveClip(initial=0.4))
    other.load_state_dict(state)
    assert other.steps == 2
    assert other.spent().epsilon == trained.plan.spent(2)


@pytest.mark.parametrize("clip", [ps.ClippedSum((0.3, 0.4), per=[["0.weight", "0.bias"], ["2.weight", "2.bias"]])])
def test_clips_survive_json(clip: Any, tmp_path: Path) -> None:
    trained = private(clip=clip)
    trained.save(tmp_path / "run")
    trained.resume(tmp_path / "run")


def test_a_state_in_the_middle_of_a_batch_has_nothing_of_it() -> None:
    trained = private()
    for batch in trained.batches(dataset(), physical_batch_size=3):
        trained.step(losses_of(trained._model, batch))
        break
    state = trained.state_dict()
    assert state["steps"] == 0
    trained.load_state_dict(state)
    with pytest.raises(dp.PrivacyError, match="no batch waits"):
        trained.step(losses_of(trained._model, batch))


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"plan_": plan(steps=7)}, "steps=6 instead of 7"),
    ({"plan_": plan(noise_multiplier=0.5)}, "noise_multiplier=1.0 instead of 0.5"),
    ({"clip": ps.ClippedSum(3.0)}, "clip: .*0.3.* instead of .*3.0"),
    ({"model": nn.Linear(WIDTH, 3)}, "parameters: .*0.weight.* instead of"),
]


@pytest.mark.parametrize(("other", "message"), OTHERS, ids=[m[:20] for _, m in OTHERS])
def test_states_of_other_runs_are_refused(other: dict[str, Any], message: str, tmp_path: Path) -> None:
    trained = private()
    trained.save(tmp_path / "run")
    with pytest.raises(dp.PrivacyError, match=f"state of another run.*{message}"):
        private(**other).load_state_dict(trained.state_dict())
    with pytest.raises(dp.PrivacyError, match=f"state of another run.*{message}"):
        private(**other).resume(tmp_path / "run")


def test_a_journal_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    trained = private(journal=path)
    train(trained, 2)
    assert len(path.read_text().splitlines()) == 3
    again = private(journal=path)  # the process died before anything was saved: what it has spent is spent
    assert again.steps == 2
    trained.save(tmp_path / "run")
    again.resume(tmp_path / "run")
    assert again.steps == 2
    with pytest.raises(dp.PrivacyError, match=r"journal of a run with another plan: .*steps=6 instead of 9"):
        private(plan_=plan(steps=9), journal=path)


def test_journals_that_are_wrong_or_missing(tmp_path: Path) -> None:
    trained = private()
    trained.save(tmp_path / "run")
    with pytest.raises(dp.PrivacyError, match=r"run.journal is the journal of another run"):
        private().save(tmp_path / "run")
    with pytest.raises(dp.PrivacyError, match="is not that of the run"):
        private(journal=tmp_path / "mine").resume(tmp_path / "run")
    (tmp_path / "run.journal").rename(tmp_path / "moved")
    with pytest.raises(dp.PrivacyError, match=r"the journal .*run.journal is missing"):
        private().resume(tmp_path / "run")
    private(journal=tmp_path / "moved").resume(tmp_path / "run")
    with pytest.raises(dp.PrivacyError, match="taken it over"):  # a step that cannot be written down is not made
        train(trained, 1)
    assert trained.steps == 0
    (tmp_path / "moved").write_text("nonsense\n")
    with pytest.raises(dp.PrivacyError, match="is not the journal of a private run"):
        private(journal=tmp_path / "moved")


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match=r"was not written by private.save"):
        private().resume(tmp_path / "other")
    with pytest.raises(ValueError, match="no state of private training of version 1"):
        private().load_state_dict({"steps": 0})


def test_what_only_pickle_could_save_is_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(
        TypeError, match=r"optimizer.param_groups.0.odd is a object, which cannot be saved without pickle"
    ):
        private(model, optimizer=optimizer).save(tmp_path / "run")


def test_a_missing_safetensors_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"safetensors.*pip install 'persample\[dp\]'"):
        private().save(tmp_path / "run")
