"""Plans without a delta: epsilon is asked for when a run reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from persample import dp
from tests.dp.helpers import dataset, losses_of, network, plan, private

LENGTH: dict[str, Any] = {"examples": 60, "batch_size": 12, "steps": 4, "accountant": "rdp"}
KINDS: dict[str, dict[str, Any]] = {
    "poisson": {},
    "shuffled": {"sampling": "shuffled"},
    "schedule": {"noise_schedule": (1.0, 0.5)},
    "banded": {"mechanism": "banded", "bands": 2},
    "blt": {"mechanism": "blt", "sampling": "cyclic"},
}


def run(trained: dp.Private, **options: Any) -> None:
    for batch in trained.batches(dataset(), **options):
        trained.step(losses_of(trained._model, batch))


@pytest.mark.parametrize("kind", KINDS)
def test_epsilon_is_that_of_a_plan_with_the_delta(kind: str, tmp_path: Path) -> None:
    without = dp.Plan(noise_multiplier=1.5, **LENGTH, **KINDS[kind])
    assert (without.delta, without.epsilon) == (None, None)
    for delta in (1e-3, 1e-6):
        told = replace(without, delta=delta, epochs=None)
        assert without.spent(4, delta=delta) == told.epsilon
    trained = private(plan_=without)
    run(trained, steps=2)
    trained.save(tmp_path / "run")
    again = private(plan_=without)
    again.resume(tmp_path / "run")
    run(again)
    assert again.spent(1e-6) == dp.Spent(told.spent(4), 1e-6, again.steps)
    with pytest.raises(ValueError, match=r"the plan has no delta: say at which .* spent\(delta=1e-5\)"):
        again.spent()
    with pytest.raises(ValueError, match="delta must be a number between 0 and 1, not 2"):
        again.spent(2.0)


def test_a_run_ends_with_its_plan() -> None:
    trained = private(plan_=dp.Plan(noise_multiplier=1.5, **LENGTH))
    run(trained)
    assert trained.steps == 4
    with pytest.raises(dp.PrivacyError, match=r"the plan is used up: 4 of 4 steps are done\. More steps"):
        trained._ledger.account(False)


def test_it_prints_itself() -> None:
    assert str(dp.Plan(noise_multiplier=1.5, **LENGTH)).splitlines()[1:] == [
        "noise multiplier 1.5",
        "no delta: spent(delta=...) has the epsilon (RDP accountant, neighbours: one example more or less)",
    ]
    assert "no privacy: without noise" in str(dp.Plan(noise_multiplier=0.0, **LENGTH))
    assert "DP-SGD" not in str(dp.Plan(noise_multiplier=1.5, **LENGTH, **KINDS["banded"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": 1.0}, "an epsilon is promised at a delta: give it"),
        ({"epsilon": 1.0, "noise_multiplier": 3.0}, "an epsilon is promised at a delta: give it"),
        ({"epsilon": 1.0, "noise_multiplier": 3.0, "steps": None}, "an epsilon is promised at a delta: give it"),
        ({}, "missing are epsilon and noise_multiplier"),
        ({"noise_multiplier": 1.0, "mechanism": "banded"}, "bands are best depends on delta: give delta, or bands"),
    ],
)
def test_what_needs_a_delta(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dp.Plan(**{**LENGTH, **settings})
    with pytest.raises(ValueError, match="give this one a delta to compare it"):
        dp.Plan(noise_multiplier=1.0, **LENGTH).dp_sgd()


def test_several_runs_are_told_of() -> None:
    model, without = network(), dp.Plan(noise_multiplier=1.5, **LENGTH)
    run(private(model, without))
    for second in (without, plan(steps=1)):
        with pytest.warns(dp.PrivacyWarning, match="dataset. This run .* epsilons and the deltas of all runs add up"):
            private(model, second).batches(dataset())
