"""Files that are damaged or forged, that name other files, or that were never finished."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from persample import dp
from persample.dp import state as module
from tests.dp.helpers import WIDTH, flat, private
from tests.dp.noises import advance, noisy_run


def saved(folder: Path, steps: int = 2) -> Path:
    trained = noisy_run()
    advance(trained, steps)
    trained.save(folder / "run")
    return folder / "run"


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The same tensors, and other accounts."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found = json.loads(file.metadata()["persample"])
    change(found)
    save_file(tensors, path, {"persample": json.dumps(found)})


def setting(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        for key in keys[:-1]:
            found = found[key]
        found[keys[-1]] = to

    return change


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    **{
        f"{name} {value!r}": setting("state", name, to=value)
        for name, values in {
            "version": [2, None, "1"],
            "run": [None, 1, "", "x" * 16],
            "steps": [-1, True, 2.0, "2", None, 7, 10**30],
            "passes": [-1, False, 3, None],
            "dropped": [-1, True, None, 0.5],
            "bound": [-1.0, 0.0, float("nan"), float("inf"), "1", True],
            "plan": [None, [], {}],
            "bindings": [None, []],
            "unknown": [0],
        }.items()
        for value in values
    },
    "no state": lambda found: found.pop("state"),
    "a state without steps": lambda found: found["state"].pop("steps"),
    "no journal": lambda found: found.pop("journal"),
    "a journal that is no name": setting("journal", to=["run.journal"]),
    "no tree": lambda found: found.pop("tree"),
    "a tree that is none": setting("tree", to=[1]),
    "a tensor that is missing": setting("tree", "dict", 0, 1, to={"tensor": "none"}),
    "a tree of other things": setting("tree", to={"dict": [["model", {"value": 1}]]}),
    "keys that are none": setting("tree", to={"dict": [[{}, {"value": 1}]]}),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_files_are_refused_and_change_nothing(forgery: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    forge(path, FORGERIES[forgery])
    resumed, journal = noisy_run(), (tmp_path / "run.journal").read_bytes()
    before = flat(resumed._model)
    with pytest.raises(ValueError, match=r"/run was not written by private\.save, or is damaged"):
        resumed.resume(path)
    assert torch.equal(flat(resumed._model), before)
    assert (tmp_path / "run.journal").read_bytes() == journal
    advance(resumed)  # and the run goes on as if it had not been asked


@pytest.mark.parametrize("name", ["no state", "steps -1", "unknown 0", "bound -1.0"])
def test_forged_states_are_refused(name: str) -> None:
    found = {"state": noisy_run().state_dict()}
    FORGERIES[name](found)
    with pytest.raises(ValueError, match=r"state of private|accounts"):
        noisy_run().load_state_dict(found.get("state"))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 1, 100])
def test_files_that_are_cut(size: int, tmp_path: Path) -> None:
    path = saved(tmp_path)
    os.truncate(path, size)
    with pytest.raises(ValueError, match=r"/run was not written by private\.save, or is damaged"):
        noisy_run().resume(path)


def test_what_does_not_fit_the_model_makes_no_half_of_a_run(tmp_path: Path) -> None:
    path = saved(tmp_path)
    forge(path, setting("tree", "dict", 1, 1, to={"dict": [["state", {"dict": []}]]}))
    resumed = noisy_run()
    with pytest.raises(ValueError, match=r"/run does not fit this model and optimizer"):
        resumed.resume(path)
    with pytest.raises(dp.PrivacyError, match="until the run is resumed"):
        advance(resumed)


@pytest.mark.parametrize("named", ["../elsewhere/journal", "/tmp/journal", "a/../../journal", "a\0b"])
def test_a_file_names_no_journal_elsewhere(named: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    forge(path, setting("journal", to=named))
    with pytest.raises(dp.PrivacyError, match=r"/run names a journal in another folder.*dp\.Private\(\.\.\., journal="):
        noisy_run().resume(path)
    resumed = noisy_run(journal=tmp_path / "run.journal")
    resumed.resume(path)
    assert resumed.steps == 2


def test_a_journal_that_was_cut_or_put_back_from_a_copy(tmp_path: Path) -> None:
    trained = noisy_run()
    trained.save(tmp_path / "run")
    journal = tmp_path / "run.journal"
    old = journal.read_bytes()
    advance(trained, 3)
    trained.save(tmp_path / "run")
    journal.write_bytes(old)
    with pytest.raises(dp.PrivacyError, match="counts 0 steps, but 3 were made: it was cut, or is an old copy"):
        noisy_run().resume(tmp_path / "run")


def test_a_plan_whose_epsilon_was_rounded_in_another_way_goes_on(tmp_path: Path) -> None:
    path, journal = saved(tmp_path), tmp_path / "run.journal"
    epsilon = noisy_run().plan.epsilon
    assert epsilon is not None
    for other, fine in ((epsilon * (1 - 1e-12), True), (epsilon * 0.99, False)):
        header, rest = journal.read_text().split("\n", 1)
        changed = json.loads(header)
        changed["plan"]["epsilon"] = other
        journal.write_text(f"{json.dumps(changed)}\n{rest}")
        forge(path, setting("state", "plan", "epsilon", to=other))
        resumed = noisy_run()
        if fine:
            resumed.resume(path)
            assert resumed.steps == 2
        else:
            with pytest.raises(dp.PrivacyError, match=r"epsilon=.* instead of .* \(solved for"):
                resumed.resume(path)


def test_states_of_another_run_after_steps_of_its_own(tmp_path: Path) -> None:
    path, trained = saved(tmp_path), noisy_run()
    advance(trained)
    with pytest.raises(dp.PrivacyError, match="has made 1 steps of a run of its own"):
        trained.resume(path)
    with pytest.raises(dp.PrivacyError, match="has made 1 steps of a run of its own"):
        trained.load_state_dict(noisy_run().state_dict())


def test_a_first_save_that_was_not_finished_is_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            noisy_run().save(tmp_path / "run")
    assert (tmp_path / "run.journal").exists()
    trained = noisy_run()
    trained.save(tmp_path / "run")
    advance(trained)
    (tmp_path / "run").unlink()
    with pytest.raises(dp.PrivacyError, match=r"which has spent 1 steps: go on with it .* journal="):
        noisy_run().save(tmp_path / "run")
    assert noisy_run(journal=tmp_path / "run.journal").steps == 1


def test_a_save_that_fails_leaves_no_journal(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(TypeError, match="cannot be saved without pickle"):
        private(model, optimizer=optimizer).save(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_files_hold_only_what_is_known() -> None:
    """A new kind of entry in the tree must not be taken for a value."""
    with pytest.raises(ValueError, match="code"):
        module._unpacked({"code": "print()"}, {})
