"""Several runs with the same model or data in one process: their accounts do not add up by themselves."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from persample import dp
from persample.dp.runs import RUNS
from tests.dp.helpers import dataset, losses_of, network, plan, private


def run(trained: dp.Private, data: Any, steps: int = 2) -> None:
    for batch in trained.batches(data, steps=steps):
        trained.step(losses_of(trained._model, batch))


@pytest.mark.parametrize("same", ["model", "data", "both", "wrapped"])
def test_a_second_run_says_what_both_spend(same: str) -> None:
    model, data = network(), dataset()
    first = private(model)
    run(first, data)
    again = network() if same == "data" else nn.Sequential(model) if same == "wrapped" else model
    second = private(again)
    spent = first.spent().epsilon
    both = spent + second.plan.budget
    message = (
        rf"an earlier run in this process had the same model or dataset, and spent epsilon {spent:.4g} at delta 1e-05. "
        rf".* epsilon is up to {both:.4g} at delta 2e-05"
    )
    with pytest.warns(dp.PrivacyWarning, match=message):
        run(second, dataset() if same == "model" else data)
    run(second, data)  # said once


def test_many_runs_add_up() -> None:
    data = dataset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dp.PrivacyWarning)
        for _ in range(3):
            run(private(), data)
    with pytest.warns(dp.PrivacyWarning, match="3 earlier runs in this process .* at delta 3e-05"):
        private().batches(data)


def test_an_earlier_run_is_remembered_after_it_is_gone() -> None:
    model = network()
    run(private(model), dataset())
    gc.collect()
    with pytest.warns(dp.PrivacyWarning, match="an earlier run"):
        private(model).batches(dataset())


def test_a_run_that_starts_to_spend_later() -> None:
    model, data = network(), dataset()
    first, second = private(model), private(model)
    first.batches(data)
    run(second, data)
    with pytest.warns(dp.PrivacyWarning, match="an earlier run"):
        run(first, data)


def test_resumed_runs_are_one(tmp_path: Path) -> None:
    model, data, path = network(), dataset(), tmp_path / "run.safetensors"
    first = private(model)
    first.save(path)
    run(first, data)
    second = private(model)
    second.resume(path)
    run(second, data)
    third = private(model)
    third.load_state_dict(second.state_dict())
    run(third, data)
    journal = private(model, journal=f"{path}.journal")
    journal.batches(data)
    assert third.steps == 6


def test_a_resumed_run_counts_once(tmp_path: Path) -> None:
    """By what it has spent in the end."""
    model, path = network(), tmp_path / "run.safetensors"
    first = private(model)
    run(first, dataset())
    first.save(path)
    second = private(model)
    second.resume(path)
    run(second, dataset())
    with pytest.warns(dp.PrivacyWarning, match=f"an earlier run .* spent epsilon {second.spent().epsilon:.4g} at"):
        private(model).batches(dataset())


def test_nothing_to_say() -> None:
    """Runs without a step, with other models and data, and runs that promise nothing."""
    model, data = network(), dataset()
    private(model).batches(data)
    trained = private(model)
    run(trained, data)
    run(private(), dataset())
    run(private(model, plan(noise_multiplier=0.0)), data)
    listed = [data[i] for i in range(len(data))]
    run(private(), listed)
    run(private(), listed)  # a list cannot be recognised without keeping it alive


def test_models_and_data_are_not_kept_alive() -> None:
    before = len(RUNS._of)
    model, data = network(), dataset()
    run(private(model), data)
    assert len(RUNS._of) == before + 3  # two layers and the data
    seen = [weakref.ref(model), weakref.ref(data)]
    del model, data
    gc.collect()
    assert [one() for one in seen] == [None, None]
    assert len(RUNS._of) == before
