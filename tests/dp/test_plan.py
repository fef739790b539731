"""Plans: what is solved keeps the promise, what cannot be kept is refused by name."""

from __future__ import annotations

import json
import math
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from persample import dp

BASE: dict[str, Any] = {"examples": 1000, "batch_size": 50, "delta": 1e-5, "accountant": "rdp"}


def plan(**more: Any) -> dp.Plan:
    return dp.Plan(**{**BASE, **more})


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_solved_noise_is_the_least_that_keeps_the_promise(accountant: str, sampling: str, epsilon: float) -> None:
    kinds = {"accountant": accountant, "sampling": sampling, "epochs": 3}
    solved = plan(epsilon=epsilon, **kinds)
    assert solved.spent(solved.length) <= epsilon
    assert plan(noise_multiplier=solved.noise * 0.997, **kinds).budget > epsilon


@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_solved_length_is_the_longest_that_keeps_the_promise(sampling: str) -> None:
    solved = plan(epsilon=5.0, noise_multiplier=4.0, sampling=sampling)
    assert solved.spent(solved.length) <= 5.0
    assert solved.spent(math.ceil(solved.length * 1.002) + 20) > 5.0
    assert solved.epochs == pytest.approx(solved.length / 20)


def test_solved_epsilon_is_the_accountants() -> None:
    solved = plan(noise_multiplier=1.0, steps=100)
    assert solved.epsilon == solved.spent(100)
    assert solved.spent(0) == 0
    assert solved.spent(50) < solved.spent(100)


def test_epochs_become_steps_rounded_up() -> None:
    assert plan(epochs=1, noise_multiplier=1.0).steps == 20
    assert plan(epochs=0.01, noise_multiplier=1.0).steps == 1
    uneven = plan(examples=1001, epochs=2, noise_multiplier=1.0)
    assert uneven.steps == math.ceil(2 * 1001 / 50) == 41
    assert plan(examples=1001, epochs=2, noise_multiplier=1.0, sampling="shuffled").steps == 42
    assert plan(batch_size=1000, epochs=3, noise_multiplier=1.0).steps == 3


def test_without_noise_there_is_no_promise() -> None:
    bare = plan(epochs=1, noise_multiplier=0)
    assert bare.epsilon == math.inf
    assert "no privacy" in str(bare)


def test_it_prints_itself() -> None:
    lines = str(plan(epochs=1, noise_multiplier=2.0, sampling="shuffled")).splitlines()
    assert lines[0] == "20 steps (1 epochs) of 50 of 1000 examples, shuffled every epoch"
    assert lines[1] == "noise multiplier 2"
    assert re.fullmatch(r"epsilon [\d.]+ at delta 1e-05 \(RDP accountant, neighbours: one example replaced\)", lines[2])


def test_it_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        plan(epochs=1, noise_multiplier=1.0).noise_multiplier = 0.1  # type: ignore[misc]


def test_three_that_agree_are_fine() -> None:
    assert plan(epochs=1, noise_multiplier=2.0, epsilon=5.0).epsilon == 5.0


REFUSED = [
    ({"epochs": 1}, "missing are epsilon and noise_multiplier"),
    ({"epsilon": 1.0}, "missing are steps and noise_multiplier"),
    ({"epochs": 1, "steps": 3, "epsilon": 1.0}, "length is given twice: epochs=1 and steps=3"),
    ({"epochs": 10, "noise_multiplier": 0.7, "epsilon": 0.5}, "contradicts itself: 200 steps .* more than 0.5"),
    ({"epochs": 1, "epsilon": 1.0, "batch_size": 1001}, "batch_size 1001 is larger than the dataset of 1000"),
    ({"epochs": 1, "epsilon": 0.0}, "epsilon must be positive"),
    ({"epochs": 1, "epsilon": -1.0}, "epsilon must be a number that is not negative, not -1.0"),
    ({"epochs": 1, "epsilon": math.nan}, "epsilon must be a number that is not negative, not nan"),
    ({"epochs": 0, "epsilon": 1.0}, "epochs must be positive and finite"),
    ({"epochs": 1, "noise_multiplier": math.inf}, "noise_multiplier must be finite"),
    ({"epochs": 1, "epsilon": 1.0, "delta": 0.0}, "delta must be a number between 0 and 1"),
    ({"epochs": 1, "epsilon": 1.0, "delta": 1.5}, "delta must be a number between 0 and 1"),
    ({"epochs": 1, "epsilon": 1.0, "examples": 0}, "examples must be a positive integer, not 0"),
    ({"epochs": 1, "epsilon": 1.0, "batch_size": 2.5}, "batch_size must be a positive integer, not 2.5"),
    ({"steps": True, "epsilon": 1.0}, "steps must be a positive integer, not True"),
    ({"epochs": 1, "epsilon": 1.0, "accountant": "gdp"}, "accountant must be one of pld, rdp, not 'gdp'"),
    ({"epochs": 1, "epsilon": 1.0, "sampling": "none"}, "sampling must be one of poisson, shuffled, cyclic, not"),
    ({"noise_multiplier": 0.5, "epsilon": 0.1}, "a single step with noise_multiplier 0.5 already spends"),
    ({"noise_multiplier": 1e4, "epsilon": 1.0}, "lasts for more than 10000000 steps"),
    ({"epochs": 1, "epsilon": 1e-9, "delta": 1e-12}, "no noise keeps epsilon 1e-09"),
]


@pytest.mark.parametrize(("more", "message"), REFUSED, ids=[m[:30] for _, m in REFUSED])
def test_impossible_plans_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**more)


def test_a_large_delta_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"delta 0.001 is not below 1 / examples = 0.001"):
        plan(epochs=1, epsilon=1.0, delta=1e-3)


SETTINGS: dict[str, dict[str, Any]] = {
    "epsilon": {"steps": 80, "noise_multiplier": 1.5},
    "noise_multiplier": {"steps": 80, "epsilon": 3.0},
    "steps": {"epsilon": 3.0, "noise_multiplier": 1.0},
}


def solved(name: str) -> tuple[dp.Plan, dict[str, Any]]:
    """A plan that was solved for something, and how it is stored."""
    found = plan(**SETTINGS[name])
    assert found.solved == name
    return found, json.loads(json.dumps(found.as_dict()))


@pytest.mark.parametrize(
    ("name", "factor", "fine"),
    [
        ("epsilon", 1 + 1e-9, True),
        ("epsilon", 1 - 1e-9, True),
        ("epsilon", 1.0005, True),  # more was promised than is spent
        ("epsilon", 1.002, False),
        ("epsilon", 1 - 1e-5, False),  # less was promised
        ("noise_multiplier", 1.0005, True),  # steps had more noise than they are accounted with
        ("noise_multiplier", 1.002, False),
        ("noise_multiplier", 1 - 1e-5, False),  # steps had less
    ],
)
def test_solved_values_may_differ_as_solving_does(name: str, factor: float, fine: bool) -> None:
    found, stored = solved(name)
    assert found.differences(stored) == []
    other = {**stored, name: stored[name] * factor}
    assert (found.differences(other) == []) == fine
    assert found.differences({**other, "solved": None})  # what was given is compared to the last bit


def test_solved_steps_may_be_fewer() -> None:
    found, stored = solved("steps")
    for more, fine in ((0, True), (1, True), (-1, False), (3, False)):
        wrong = found.differences({**stored, "steps": found.length + more})
        assert (wrong == []) == fine
        assert fine or "to keep the old value, give it with the other two" in wrong[0]


def test_an_old_solution_can_be_kept() -> None:
    found, stored = solved("noise_multiplier")
    stored["noise_multiplier"] = found.noise * 1.01
    assert found.differences(stored)
    assert plan(**SETTINGS["noise_multiplier"], noise_multiplier=found.noise * 1.01).differences(stored) == []


@pytest.mark.parametrize("name", [*BASE, "steps", "noise_multiplier", "sampling"])
def test_given_values_are_compared_exactly(name: str) -> None:
    found, stored = solved("epsilon")
    for value in (None, True, "other", 7, math.nextafter(BASE["delta"], 1), math.nextafter(1.5, 2)):
        assert found.differences({**stored, name: value})
    one = plan(steps=1, noise_multiplier=1.0)
    assert one.differences({**one.as_dict(), "steps": True})
