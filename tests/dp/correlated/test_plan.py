"""Plans with correlated noise: accounted as the library says, the same as DP-SGD in the limit, refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import dp_accounting
import pytest
from dp_accounting import rdp

from persample import dp
from tests.dp.correlated import dense

BASE: dict[str, Any] = {"examples": 1000, "batch_size": 50, "delta": 1e-5, "accountant": "rdp"}


def plan(**more: Any) -> dp.Plan:
    return dp.Plan(**{**BASE, **more})


def by_library(event: dp_accounting.DpEvent, times: int) -> float:
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, times))
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.parametrize(("bands", "steps"), [(2, 100), (4, 100), (7, 100), (20, 100), (20, 21)])
def test_bands_are_accounted_as_dp_sgd_on_a_part_of_the_examples(bands: int, steps: int) -> None:
    found = plan(mechanism="banded", bands=bands, steps=steps, noise_multiplier=2.0)
    event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(2.0)
    if bands < 20:
        event = dp_accounting.PoissonSampledDpEvent(bands * 50 / 1000, event)
    assert found.epsilon == pytest.approx(by_library(event, math.ceil(steps / bands)), rel=1e-12)
    assert found.spent(1) == pytest.approx(by_library(event, 1), rel=1e-12)
    assert found.spent(bands) == found.spent(1) < found.spent(bands + 1)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("sampling", ["poisson", "cyclic"])
@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 3, "epsilon": 2.0},
        {"epochs": 3, "noise_multiplier": 2.0},
        {"noise_multiplier": 2.0, "epsilon": 4.0},
    ],
    ids=["noise", "epsilon", "steps"],
)
def test_one_band_is_dp_sgd(settings: dict[str, Any], sampling: str, accountant: str) -> None:
    kinds = {"sampling": sampling, "accountant": accountant}
    plain, one = plan(**settings, **kinds), plan(**settings, **kinds, mechanism="banded", bands=1)
    for name in ("noise_multiplier", "epsilon", "steps", "epochs", "rate", "expected_error"):
        assert getattr(plain, name) == getattr(one, name)
    assert [plain.spent(t) for t in (0, 1, 7)] == [one.spent(t) for t in (0, 1, 7)]


@pytest.mark.parametrize("settings", [{"mechanism": "gaussian"}, {"mechanism": "banded", "bands": 8}])
def test_cyclic_batches_are_one_gaussian_for_every_epoch(settings: dict[str, Any]) -> None:
    found = plan(**settings, sampling="cyclic", epochs=3, noise_multiplier=4.0)
    event = dp_accounting.GaussianDpEvent(4.0)
    assert found.epsilon == pytest.approx(by_library(event, 3), rel=1e-9)
    assert found.spent(20) == pytest.approx(by_library(event, 1), rel=1e-9)
    assert found.spent(21) == pytest.approx(by_library(event, 2), rel=1e-9)
    assert found.contributions == 1


def test_a_blt_is_one_gaussian_of_its_exact_sensitivity() -> None:
    found = plan(mechanism="blt", sampling="cyclic", epochs=3, noise_multiplier=5.0)
    c = dense.matrix(found.encoder.column)
    for steps in (1, 19, 20, 21, 60):
        among = [list(range(first, steps, 20)) for first in range(min(steps, 20))]
        moved = math.sqrt(dense.squared_sensitivity(c[:steps, :steps], among))
        event = dp_accounting.GaussianDpEvent(5.0 * found.encoder.norm / moved)
        assert found.spent(steps) == pytest.approx(by_library(event, 1), rel=1e-9)
    assert found.epsilon == found.spent(60)
    assert found.spent(0) == 0


@pytest.mark.parametrize(
    "settings",
    [{"mechanism": "banded", "bands": 4}, {"mechanism": "blt", "sampling": "cyclic"}, {"sampling": "cyclic"}],
)
@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_solved_noise_is_the_least_that_keeps_the_promise(settings: dict[str, Any], epsilon: float) -> None:
    solved = plan(epsilon=epsilon, epochs=3, **settings)
    assert solved.spent(solved.length) <= epsilon
    assert plan(noise_multiplier=solved.noise * 0.997, epochs=3, **settings).budget > epsilon


def test_steps_are_solved_for() -> None:
    solved = plan(mechanism="banded", bands=4, noise_multiplier=4.0, epsilon=5.0)
    assert solved.spent(solved.length) <= 5.0 < solved.spent(math.ceil(solved.length * 1.002) + 20)


@pytest.mark.slow
def test_chosen_bands_have_no_more_error_than_others() -> None:
    chosen = plan(mechanism="banded", epochs=10, epsilon=8.0)
    assert chosen.bands is not None
    errors = {b: plan(mechanism="banded", bands=b, epochs=10, epsilon=8.0).expected_error for b in (1, 2, 4, 8, 16)}
    assert errors[chosen.bands] <= 1.03 * min(errors.values())
    assert chosen.bands > 1
    few = plan(mechanism="banded", epochs=10, epsilon=0.05)
    assert few.bands is not None
    assert few.bands < chosen.bands  # the less is promised away, the more sampling gains
    assert plan(mechanism="banded", epochs=10, noise_multiplier=1.0).bands in errors


def test_where_bands_cost_nothing_many_are_chosen() -> None:
    assert plan(mechanism="banded", epochs=10, noise_multiplier=0.0).bands == 16
    assert plan(mechanism="banded", sampling="cyclic", epochs=10, epsilon=1.0).bands == 16


def test_the_expected_error_beside_that_of_dp_sgd() -> None:
    found = plan(mechanism="banded", bands=4, epochs=10, epsilon=8.0)
    other = found.dp_sgd()
    assert (other.mechanism, other.sampling, other.epsilon, other.steps) == ("gaussian", "poisson", 8.0, 200)
    assert other.expected_error == pytest.approx(other.noise * math.sqrt(201 / 2))
    ratio = found.expected_error / other.expected_error
    lines = str(found).splitlines()
    assert lines[0] == "200 steps (10 epochs) of 50 of 1000 examples on average, Poisson sampling from 4 parts in turn"
    assert lines[1] == f"noise multiplier {found.noise:.5g}, correlated by 4 bands"
    assert lines[2] == f"expected error of sums {found.expected_error:.4g} sensitivities, {ratio:.4g} times DP-SGD's"
    assert lines[3].endswith("(RDP accountant, neighbours: one example more or less, in its place)")


def test_it_prints_itself_with_buffers_and_without_noise() -> None:
    text = str(plan(mechanism="blt", sampling="cyclic", buffers=2, epochs=2, noise_multiplier=0, momentum=0.9))
    assert "50 of 1000 examples, the same in every epoch" in text
    assert "correlated by 2 buffers\nexpected error of sums 0 sensitivities\nno privacy" in text
    assert "the same in every epoch\nnoise multiplier 3\neps" in str(
        plan(sampling="cyclic", steps=9, noise_multiplier=3)
    )


@pytest.mark.parametrize("settings", [{"mechanism": "banded", "bands": 2}, {"mechanism": "blt", "sampling": "cyclic"}])
def test_it_prints_itself_where_there_is_no_dp_sgd_to_compare_with(settings: dict[str, Any]) -> None:
    """So much noise that its epsilon is rounded to zero, which nothing can be planned for."""
    found = plan(steps=40, noise_multiplier=1e6, **settings)
    assert found.epsilon == 0
    assert f"expected error of sums {found.expected_error:.4g} sensitivities\nepsilon 0 at" in str(found)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [1e-200, 1e-12, 1e-4, 1e-3, 0.05])
def test_it_is_compared_with_the_least_noise_of_dp_sgd_or_not_at_all(noise: float, accountant: str) -> None:
    """With next to no noise, DP-SGD's is not solved for, and epsilon may be beyond the accountant's numbers."""
    found = plan(mechanism="banded", bands=2, steps=40, noise_multiplier=noise, accountant=accountant)
    other, text = found.dp_sgd(), str(found)
    if "times DP-SGD's" in text:
        assert other._epsilon(40, other.noise * 0.99) > found.budget  # with less noise it would promise less
    assert ("times DP-SGD's" in text) == (noise == 0.05)
    assert ("with so little noise, epsilon is infinite" in text) == (found.budget == math.inf)
    if noise == 1e-200:
        assert found.budget == math.inf


def test_only_the_plan_itself_warns_of_its_delta() -> None:
    with pytest.warns(UserWarning, match="delta 0.01 is not below 1 / examples"):
        found = plan(mechanism="banded", bands=2, steps=40, noise_multiplier=1.0, delta=0.01)
    assert "times DP-SGD's" in str(found)


def test_momentum_changes_the_encoder_and_no_promise() -> None:
    settings: dict[str, Any] = {"mechanism": "banded", "bands": 4, "epochs": 3, "epsilon": 4.0}
    without, with_ = plan(**settings), plan(**settings, momentum=0.9)
    assert without.noise == with_.noise
    assert without.encoder != with_.encoder
    assert with_.dp_sgd().expected_error > with_.expected_error


@pytest.mark.parametrize(
    "settings",
    [{"mechanism": "banded"}, {"mechanism": "blt", "sampling": "cyclic", "momentum": 0.5}, {"sampling": "cyclic"}],
)
def test_it_is_stored_and_compared(settings: dict[str, Any]) -> None:
    found = plan(epochs=3, epsilon=2.0, **settings)
    stored = json.loads(json.dumps(found.as_dict()))
    assert found.differences(stored) == []
    for name, other in (("mechanism", "other"), ("bands", 3), ("buffers", 7), ("momentum", 0.25)):
        assert found.differences({**stored, name: other})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mechanism": "tree"}, "mechanism must be one of gaussian, banded, blt, not 'tree'"),
    ({"bands": 4}, "bands=4 is for mechanism='banded', not 'gaussian'"),
    ({"mechanism": "blt", "sampling": "cyclic", "bands": 4}, "bands=4 is for mechanism='banded', not 'blt'"),
    ({"mechanism": "banded", "buffers": 4}, "buffers=4 is for mechanism='blt', not 'banded'"),
    ({"mechanism": "banded", "bands": 0}, "bands must be a positive integer, not 0"),
    ({"mechanism": "banded", "bands": True}, "bands must be a positive integer, not True"),
    ({"mechanism": "blt", "sampling": "cyclic", "buffers": 1.5}, "buffers must be a positive integer, not 1.5"),
    ({"mechanism": "banded", "momentum": 1.0}, "momentum must be a number from 0 to below 1, not 1.0"),
    ({"mechanism": "banded", "sampling": "shuffled"}, "two steps in a row.*use sampling='poisson' or 'cyclic'"),
    ({"mechanism": "blt"}, "use sampling='cyclic', not 'poisson', or mechanism='banded'"),
    ({"mechanism": "blt", "sampling": "shuffled"}, "use sampling='cyclic', not 'shuffled'"),
    ({"mechanism": "banded", "bands": 21}, "bands 21 are too many for batches of 50 of 1000 .* there are 20 at most"),
    ({"mechanism": "banded", "bands": 9, "epochs": None, "steps": 8}, "bands 9 are more than the 8 steps"),
    ({"mechanism": "banded", "epochs": None, "noise_multiplier": 1.0}, "give steps or epochs, or bands"),
    (
        {"mechanism": "blt", "sampling": "cyclic", "epochs": None, "noise_multiplier": 9.0},
        "mechanism='blt' is optimised for a number of steps: give steps or epochs",
    ),
]


@pytest.mark.parametrize(("more", "message"), REFUSED, ids=[m[:30] for _, m in REFUSED])
def test_what_cannot_be_accounted_for_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**{"epochs": 3, "epsilon": 4.0, **more})
