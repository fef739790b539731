"""Schedules of noise and bounds: every step is accounted for with its own noise, which is for its own bound."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

import persample as ps
from persample import dp
from persample.dp import schedules
from persample.dp.scheduled import Scheduled
from persample.dp.sources import Seeded
from tests.dp.helpers import dataset, flat, losses_of, network, plan, private

FALLING = (1.0, 0.8, 0.5)


def by_hand(noises: list[float], rate: float, delta: float, accountant: str) -> float:
    """One event for every step."""
    ledger = PLDAccountant() if accountant == "pld" else RdpAccountant()
    for noise in noises:
        ledger.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)))
    return float(ledger.get_epsilon(delta))


@pytest.mark.parametrize(("accountant", "steps"), [("rdp", 1), ("rdp", 2), ("rdp", 4), ("pld", 3)])
def test_every_step_is_composed_with_its_own_noise(steps: int, accountant: str) -> None:
    found = plan(steps=steps, noise_multiplier=1.2, noise_schedule=FALLING, accountant=accountant)
    noises = [1.2 * FALLING[step * 3 // steps] for step in range(steps)]
    assert [found.noise_at(step) for step in range(steps)] == noises
    for done in range(steps + 1) if accountant == "rdp" else [steps - 1]:
        want = by_hand(noises[:done], 12 / 60, 1e-5, accountant) if done else 0.0
        assert found.spent(done) == pytest.approx(want, rel=1e-4 if accountant == "pld" else 1e-9)
        assert found.spent(done) >= want * (1 - 1e-9)
    assert found.epsilon == found.spent(steps)


def test_a_constant_schedule_is_none() -> None:
    one, two = plan(noise_schedule=[1.0]), plan(noise_schedule=[0.5, 0.5], noise_multiplier=2.0)
    assert one.epsilon == two.epsilon == plan().epsilon
    assert one.expected_error == pytest.approx(plan().expected_error)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_expected_error_is_that_of_sums(momentum: float) -> None:
    """Against the dense workload, and the encoder's where noise is the same in all steps."""
    steps = 11
    found = plan(steps=steps, noise_schedule=FALLING, momentum=momentum)
    workload = np.array(
        [[sum(momentum**i for i in range(t - s + 1)) if s <= t else 0.0 for s in range(steps)] for t in range(steps)]
    )
    noise = np.array([found.noise_at(step) for step in range(steps)])
    assert found.expected_error == pytest.approx(float(np.sqrt(((workload * noise) ** 2).sum(1).mean())))
    same = plan(steps=steps, noise_schedule=[1.0], momentum=momentum)
    assert same.expected_error == pytest.approx(plan(steps=steps, momentum=momentum).expected_error)


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_the_scale_is_solved_for(accountant: str) -> None:
    settings: dict[str, Any] = {"steps": 30, "epsilon": 4.0, "noise_schedule": FALLING, "accountant": accountant}
    found = plan(**settings, noise_multiplier=None)
    assert found.solved == "noise_multiplier"
    assert found.spent(30) <= 4.0
    assert plan(**{**settings, "epsilon": None}, noise_multiplier=found.noise * 0.997).budget > 4.0
    scaled = plan(**{**settings, "noise_schedule": [2 * f for f in FALLING]}, noise_multiplier=None)
    assert scaled.noise == pytest.approx(found.noise / 2, rel=2e-3)


def test_counts_of_steps() -> None:
    for levels in (1, 2, 3, 7, 20):
        factors = [1.0 + level for level in range(levels)]
        for steps in (1, 2, 5, 19, 40):
            for done in range(steps + 1):
                want: dict[float, int] = {}
                for step in range(done):
                    factor = schedules.factor_at(factors, step, steps)
                    want[factor] = want.get(factor, 0) + 1
                assert schedules.counts(factors, done, steps) == want
    assert schedules.counts([2.0, 1.0, 2.0], 6, 6) == {2.0: 4, 1.0: 2}


def test_schedules_by_name() -> None:
    for make in (schedules.linear, schedules.exponential, schedules.cosine):
        found = make(2.0, 0.5, levels=9)
        assert len(found) == 9
        assert (found[0], found[-1]) == pytest.approx((2.0, 0.5))
        assert list(found) == sorted(found, reverse=True)
    assert len(schedules.linear(1.0, 0.5)) == 16


def test_it_prints_and_stores_itself() -> None:
    found = plan(noise_schedule=FALLING)
    assert str(found).splitlines()[1] == "noise multiplier 1, times 0.5 to 1 in 3 stages"
    stored = json.loads(json.dumps(found.as_dict()))
    assert stored["noise_schedule"] == [1.0, 0.8, 0.5]
    assert found.differences(stored) == []
    assert plan(noise_schedule=(1.0, 0.8)).differences(stored)
    assert plan().differences(stored)
    assert hash(found) == hash(plan(noise_schedule=list(FALLING)))


def noises_of(trained: dp.Private, clean: dp.Private) -> list[float]:
    """The standard deviation of the noise in every step's gradients, over that of a normal draw."""
    found = []
    for run in (trained, clean):
        run._source = Seeded(0)
        gradients = []
        for batch in run.batches(dataset()):
            run.backward(losses_of(run._model, batch))
            gradients.append(
                torch.cat([p.grad.flatten().double() for p in run._model.parameters() if p.grad is not None])
            )
            run._optimizer.step()
            run._optimizer.zero_grad()
        found.append(torch.stack(gradients))
    return [float(row.std()) for row in found[0] - found[1]]


def unmoved(**more: Any) -> dp.Private:
    """A run that leaves its model as it is."""
    model = network()
    return private(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), **more)


def ratios(planned: dict[str, Any], clip: Any, plain: Any) -> list[float]:
    with_it = noises_of(
        unmoved(plan_=plan(**planned), clip=clip),
        unmoved(plan_=plan(**{**planned, "noise_multiplier": 0.0}), clip=clip),
    )
    without = noises_of(unmoved(clip=plain), unmoved(plan_=plan(noise_multiplier=0.0), clip=plain))
    return [a / b for a, b in zip(with_it, without, strict=True)]


@pytest.mark.filterwarnings("ignore::persample.dp.PrivacyWarning")
def test_steps_have_the_noise_that_they_are_accounted_for_with() -> None:
    clip = ps.ClippedSum(0.3)
    found = ratios({"noise_schedule": FALLING}, clip, clip)
    assert found == pytest.approx([1.0, 1.0, 0.8, 0.8, 0.5, 0.5], rel=1e-3)


@pytest.mark.filterwarnings("ignore::persample.dp.PrivacyWarning")
def test_noise_is_for_the_bound_of_its_step() -> None:
    clip = ps.ClippedSum(0.3)
    found = ratios({}, dp.ScheduledClip(clip, (2.0, 1.0, 0.5)), clip)
    assert found == pytest.approx([2.0, 2.0, 1.0, 1.0, 0.5, 0.5], rel=1e-3)


def clips() -> dict[str, ps.ClippedSum]:
    return {
        "flat": ps.ClippedSum(0.3),
        "automatic": ps.ClippedSum(0.3, gamma=0.01),
        "per parameter": ps.ClippedSum(0.2, per="parameter"),
        "list": ps.ClippedSum([0.2, 0.4], per=[["0.weight", "0.bias"], ["2.weight", "2.bias"]]),
        "dict": ps.ClippedSum({"w": 0.2, "b": 0.1}, per={"w": ["0.weight", "2.weight"], "b": ["0.bias", "2.bias"]}),
    }


@pytest.mark.parametrize("name", clips())
def test_bounds_are_those_of_the_step(name: str) -> None:
    """Without noise: every step is the clipped sum with scaled bounds, and its sensitivity is scaled."""
    model, clip = network(), clips()[name]
    every = plan(batch_size=60, steps=4, noise_multiplier=0.0)
    scheduled = dp.ScheduledClip(clip, (3.0, 0.5))
    trained = private(model, every, clip=scheduled, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    for step, batch in enumerate(trained.batches(dataset())):
        factor = (3.0, 3.0, 0.5, 0.5)[step]
        assert trained._clipper.sensitivity() == pytest.approx(factor * clip.sensitivity_for(4))
        bounds = clip.max_norm
        scaled: Any = (
            {k: v * factor for k, v in bounds.items()}
            if isinstance(bounds, dict)
            else [b * factor for b in bounds]
            if isinstance(bounds, (list, tuple))
            else bounds * factor  # type: ignore[operator]
        )
        assert trained.bound == pytest.approx(
            list(scaled.values()) if isinstance(scaled, dict) else [scaled] * 4 if name == "per parameter" else scaled
        )
        trained.backward(losses_of(model, batch))
        want = ps.reduce(
            losses_of(model, dataset().tensors), model, ps.ClippedSum(scaled, per=clip.per, gamma=clip.gamma)
        )
        for key, p in model.named_parameters():
            torch.testing.assert_close(p.grad, want[0][key] / 60, atol=1e-6, rtol=2e-3)
        trained._optimizer.step()
        trained._optimizer.zero_grad()


def train(trained: dp.Private, steps: int | None = None, *, whole: bool = False) -> None:
    for batch in trained.batches(dataset(), steps=steps):
        trained.step(*batch) if whole else trained.step(losses_of(trained._model, batch))


def test_a_resumed_run_is_where_its_schedules_are(tmp_path: Path) -> None:
    """The journal counts steps that the file does not know of."""
    settings: dict[str, Any] = {
        "plan_": plan(noise_schedule=FALLING),
        "clip": dp.ScheduledClip(ps.ClippedSum(0.3), (2.0, 1.0, 0.5)),
    }
    trained = private(**settings)
    assert trained.bound == pytest.approx(0.6)
    train(trained, 1)
    trained.save(tmp_path / "run")
    train(trained, 2)
    assert trained.bound == pytest.approx(0.3)
    resumed = private(**settings)
    resumed.resume(tmp_path / "run")
    assert resumed.steps == 3
    assert resumed.bound == pytest.approx(0.3)
    assert resumed.spent().epsilon == pytest.approx(by_hand([1.0, 1.0, 0.8], 0.2, 1e-5, "rdp"))
    train(resumed, 2)
    assert resumed.bound == pytest.approx(0.15)
    train(resumed)
    assert resumed.spent().epsilon == resumed.plan.epsilon
    for other in ({"plan_": plan()}, {"clip": dp.ScheduledClip(ps.ClippedSum(0.3), (2.0, 1.0))}, {"clip": None}):
        with pytest.raises(dp.PrivacyError, match=r"another run.*(schedule|clip)"):
            private(**{**settings, **other}).resume(tmp_path / "run")


def test_a_clip_that_is_changed_is_seen() -> None:
    clip = ps.ClippedSum(0.3)
    trained = private(clip=dp.ScheduledClip(clip, (1.0, 0.5)))
    for batch in trained.batches(dataset()):
        clip.max_norm = 30.0
        with pytest.raises(dp.PrivacyError, match="the clip was changed"):
            trained.step(losses_of(trained._model, batch))
        break


def test_bounds_that_follow_a_quantile_go_with_a_schedule_of_noise() -> None:
    """In every step the counts have their noise, and sum and counts together are released with the step's."""
    planned = plan(steps=4, noise_schedule=(2.0, 1.0))
    trained = private(plan_=planned, clip=dp.AdaptiveClip(initial=0.3, count_noise=3.0))
    for step, batch in enumerate(trained.batches(dataset())):
        following: Any = trained._clipper
        std = planned.noise_at(step) * following.sensitivity()
        assert std / following._kappa == pytest.approx(3.0, rel=1e-4)
        trained.step(losses_of(trained._model, batch))
    assert trained.steps == 4


@pytest.mark.slow
def test_compiled_steps_with_a_schedule_are_those_of_the_eager_engine() -> None:
    ends = []
    for compiled in (False, True):
        model = network()
        options = {"compile": lambda x, y, m=model: losses_of(m, (x, y)), "backend": "aot_eager"} if compiled else {}
        clip = dp.ScheduledClip(ps.ClippedSum(0.3), (2.0, 1.0, 0.5))
        trained = private(model, plan(noise_schedule=FALLING), clip=clip, **options)
        train(trained, whole=compiled)
        ends.append(flat(model))
    torch.testing.assert_close(*ends, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "clip",
    [
        dp.ScheduledClip(ps.ClippedSum(0.3, gamma=0.01), (1.0,)),
        dp.ScheduledClip(ps.ClippedSum(0.3, per="parameter"), (1.0,)),
        dp.AdaptiveClip(per="parameter"),
    ],
    ids=["gamma", "groups", "adaptive groups"],
)
def test_clips_that_cannot_be_compiled_are_refused(clip: Any) -> None:
    with pytest.raises(ValueError, match="compile= is for clips whose bounds stay, and for single bounds that move"):
        private(clip=clip, compile=lambda x, y: x)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"noise_schedule": []}, ValueError, "noise_schedule must be positive and finite numbers, and one at least"),
    ({"noise_schedule": [1.0, 0.0]}, ValueError, r"noise_schedule must be positive and finite numbers.*not \[0.0\]"),
    ({"noise_schedule": [1.0, math.inf]}, ValueError, "noise_schedule must be positive and finite numbers"),
    ({"noise_schedule": [True]}, ValueError, "noise_schedule must be positive and finite numbers"),
    ({"noise_schedule": 0.5}, TypeError, "noise_schedule must be factors, each for an equal share"),
    ({"noise_schedule": "linear"}, TypeError, "noise_schedule must be factors"),
    ({"noise_schedule": FALLING, "sampling": "shuffled"}, ValueError, "not with 'shuffled' and 'gaussian'"),
    ({"noise_schedule": FALLING, "sampling": "cyclic"}, ValueError, "not with 'cyclic' and 'gaussian'"),
    ({"noise_schedule": FALLING, "mechanism": "banded", "bands": 2}, ValueError, "not with 'poisson' and 'banded'"),
    (
        {"noise_schedule": FALLING, "steps": None, "epsilon": 9.0},
        ValueError,
        "share of the steps: give steps or epochs",
    ),
]


@pytest.mark.parametrize(("more", "error", "message"), REFUSED, ids=[str(r[0])[18:40] for r in REFUSED])
def test_impossible_schedules_are_refused(more: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(**more)


def test_impossible_clips_are_refused() -> None:
    with pytest.raises(TypeError, match=r"a schedule is for a ps.ClippedSum, not for a AdaptiveClip"):
        dp.ScheduledClip(dp.AdaptiveClip(), (1.0,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="this clip has weights of its own"):
        dp.ScheduledClip(ps.ClippedSum(weights=torch.ones_like, sensitivity=1.0), (1.0,))
    with pytest.raises(ValueError, match="schedule must be positive and finite"):
        dp.ScheduledClip(ps.ClippedSum(1.0), (1.0, -1.0))
    with pytest.raises(ValueError, match=r"needs one bound for all of them: use a ps.ClippedSum in place of dp.Sched"):
        private(plan_=plan(mechanism="banded", bands=2), clip=dp.ScheduledClip(ps.ClippedSum(1.0), (1.0,)))
    with pytest.raises(ValueError, match="levels must be an integer of at least 2, not 1"):
        schedules.linear(1.0, 0.5, levels=1)
    with pytest.raises(ValueError, match="first and last must be positive"):
        schedules.exponential(1.0, 0.0)
    assert isinstance(private(clip=dp.ScheduledClip(ps.ClippedSum(1.0), (1.0,)))._clipper, Scheduled)
