"""Privacy measured from outside: one run with canaries tells sound mechanisms from broken ones.

Every canary has a coordinate of its own, and a gradient ten times as long as the clip. A coin per canary, tossed once
for the whole run, decides whether it is in the dataset; if not, an example without a gradient takes its place, so that
the releases are those of a dataset without it. Canaries in the dataset are then Poisson sampled at every step as any
example is: nobody is told when, and the score is the likelihood ratio of all releases of the run, in or out, with the
draws averaged over. This is the best that can be done, and what the accounted epsilon is about.

A sound run is refuted with a probability of 5% at most by the theorem alone. For this mechanism it is much less: given
the releases, coins are independent with known odds, so that the probability is computed, and found to be below 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import binom
from torch import Tensor, nn

import persample as ps
from persample import dp
from persample.dp import audit, clips, mechanism, private, sampling

CANARIES, GUESSES, DELTA, LENGTH = 100_000, 2000, 5e-6, 10.0
SETTINGS = {"every step": (1.0, 4, 2.8), "half of the steps": (0.5, 8, 2.8)}  # rate, steps, noise multiplier


def plan_of(setting: str) -> dp.Plan:
    rate, steps, noise = SETTINGS[setting]
    size = round(rate * CANARIES)
    return dp.Plan(examples=CANARIES, batch_size=size, steps=steps, noise_multiplier=noise, delta=DELTA)


def releases(plan: dp.Plan, included: Tensor, **options: Any) -> Tensor:
    """(steps, canaries): the noisy sums of a run, as whoever watches every update sees them."""
    model = nn.Embedding(len(included), 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []

    def watch(*_: object) -> None:
        assert model.weight.grad is not None
        seen.append(model.weight.grad.flatten() * plan.batch_size)

    optimizer.register_step_pre_hook(watch)
    run = dp.Private(model, optimizer, plan, ps.ClippedSum(1.0), **options)
    for ids in run.batches(range(len(included)), collate_fn=torch.tensor):
        run.step(LENGTH * included[ids] * model(ids).squeeze(1))
    assert run.spent().epsilon == pytest.approx(plan.budget)
    return torch.stack(seen)


def log_odds(seen: Tensor, plan: dp.Plan) -> Tensor:
    """(canaries,): of having been in the dataset, if the mechanism is as accounted."""
    gain = (seen - 0.5) / plan.noise**2  # of N(1, noise²) over N(0, noise²)
    rate = torch.tensor(plan.rate, dtype=torch.float64)
    return torch.logaddexp((1 - rate).log(), rate.log() + gain).sum(0)


def measured(setting: str, coins: int, **options: Any) -> tuple[audit.Finding, Tensor]:
    """One run, and the log odds on which its guesses are based."""
    plan, included = plan_of(setting), audit.coins(CANARIES, coins)
    scores = log_odds(releases(plan, included, **options), plan)
    return audit.measure(scores, included, GUESSES, DELTA), scores


def refuting(finding: audit.Finding, epsilon: float) -> int:
    """How many guesses have to be right for the promise to be refuted."""
    for right in range(finding.guesses + 1):
        p = audit.probability(finding.canaries, finding.guesses, right, epsilon, finding.delta)
        if p <= 1 - finding.confidence:
            return right
    raise AssertionError("no number of right guesses would refute the promise")


def chance(scores: Tensor, guesses: int, right: int) -> float:
    """The probability of so many right guesses of a sound mechanism: coins are independent, with these log odds."""
    order = scores.sort().values
    odds = torch.cat([-order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]]).sigmoid()
    counts = torch.zeros(guesses + 1, dtype=torch.float64)
    counts[0] = 1
    for p in odds:
        counts[1:] = counts[1:] * (1 - p) + counts[:-1] * p
        counts[0] *= 1 - p
    return float(counts[right:].sum())


def halve_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mechanism.Scale
    monkeypatch.setattr(
        mechanism, "Scale", lambda **k: replace(real(**k), noise_multiplier=real(**k).noise_multiplier / 2)
    )


def forget_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips.Fixed, "reduction", lambda self: ps.ClippedSum(1e9))


def forget_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody in every batch, though epsilon is for half of the steps."""
    monkeypatch.setattr(sampling, "poisson", lambda plan, source, step: list(range(plan.examples)))
    for module in (sampling, private, mechanism):
        monkeypatch.setattr(module, "most_samples", lambda plan: plan.examples)  # which would be refused


BROKEN = [
    ("every step", halve_noise),
    ("half of the steps", halve_noise),
    ("every step", forget_clipping),
    ("half of the steps", forget_clipping),
    ("half of the steps", forget_sampling),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_sound_run_is_not_refuted(setting: str) -> None:
    epsilon = plan_of(setting).budget
    found, scores = measured(setting, coins=1, seed=1)
    assert 0.3 * epsilon < found.epsilon < epsilon  # a bound of nothing would tell nothing
    assert not found.refutes(epsilon)
    assert chance(scores, GUESSES, refuting(found, epsilon)) < 1e-6


@pytest.mark.parametrize(("setting", "break_it"), BROKEN)
def test_broken_runs_are_refuted(
    setting: str, break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    found, _ = measured(setting, coins=2, seed=2)
    assert found.refutes(plan_of(setting).budget)


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_many_sound_runs(setting: str, secure: bool) -> None:
    """Without seeds: twenty runs, each of which is refuted with a probability below 1e-6, as computed."""
    epsilon = plan_of(setting).budget
    for coins in range(20):
        found, scores = measured(setting, coins, secure=secure)
        assert chance(scores, GUESSES, refuting(found, epsilon)) < 1e-8
        assert not found.refutes(epsilon)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "break_it"), BROKEN)
def test_broken_runs_are_refuted_with_any_seed(
    setting: str, break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    for seed in range(10):
        found, _ = measured(setting, coins=seed, seed=seed)
        assert found.refutes(plan_of(setting).budget)


def test_the_bound_is_the_theorems() -> None:
    """Against SciPy, with all i tried one by one."""
    for canaries, guesses, right, epsilon, delta in [
        (1000, 100, 90, 1.0, 1e-5),
        (20_000, 1000, 998, 4.4, 1e-5),
        (50, 20, 3, 2.0, 0.01),
        (7, 7, 7, 0.5, 0.0),
        (1, 1, 1, 1.0, 1e-3),
        (10, 0, 0, 1.0, 0.1),
    ]:
        q = 1 / (1 + math.exp(-epsilon))
        tail = [float(binom.sf(v - 1, guesses, q)) for v in range(right + 1)]
        most = max(((tail[right - i] - tail[right]) / i for i in range(1, right + 1)), default=0.0)
        want = min(1.0, tail[right] + 2 * canaries * delta * most)
        assert audit.probability(canaries, guesses, right, epsilon, delta) == pytest.approx(want, rel=1e-9)


def test_the_bound_inverts_the_probability() -> None:
    found = audit.lower_bound(canaries=5000, guesses=500, right=450, delta=1e-6, confidence=0.99)
    assert audit.probability(5000, 500, 450, found, 1e-6) == pytest.approx(0.01, rel=1e-6)
    assert audit.lower_bound(5000, 500, 450, 1e-6, confidence=0.9) > found
    assert audit.lower_bound(5000, 500, 450, 1e-4, confidence=0.99) < found
    assert audit.lower_bound(5000, 500, 250, 1e-6) == 0


def test_randomized_response_is_measured_almost_exactly() -> None:
    """The mechanism for which the theorem is tight: a coin is told truly with probability e^ε / (1 + e^ε).

    The bound is above ε with a probability below 1e-6, and as the share of right guesses has a standard deviation of
    0.0012, below it by more than 0.1, or twelve of them, with one far below that.
    """
    epsilon, count = 1.5, 100_000
    included = audit.coins(count, seed=0)
    truly = torch.rand(count, generator=torch.Generator().manual_seed(1)) < 1 / (1 + math.exp(-epsilon))
    scores = torch.where(truly, included, ~included).double()
    found = audit.measure(scores, included, guesses=count, delta=0.0, confidence=1 - 1e-6)
    assert epsilon - 0.1 < found.epsilon < epsilon


def test_canaries_that_look_alike_are_guessed_at_random() -> None:
    included = torch.arange(10_000) < 5000  # in an order that would tell
    found = audit.measure(torch.zeros(10_000), included, guesses=1000, delta=0.0)
    assert abs(found.right - 500) < 5 * math.sqrt(250)  # 6e-7
    assert found.epsilon < 0.1


def test_few_canaries() -> None:
    assert audit.measure(torch.zeros(0), audit.coins(0), guesses=0, delta=0.0).epsilon == 0
    one = audit.measure(torch.ones(1), torch.tensor([True]), guesses=1, delta=0.0)
    assert (one.right, one.epsilon) == (1, 0)  # right by chance with probability 1/2
    assert audit.lower_bound(1, 1, 1, 0.0, confidence=0.4) == pytest.approx(math.log(0.6 / 0.4))


def test_delta_explains_everything_or_nothing() -> None:
    assert audit.lower_bound(1000, 1000, 1000, delta=0.5) == 0
    assert audit.lower_bound(10**5, 10**5, 10**5, delta=0.0) > 10


def test_coins_are_fair() -> None:
    heads = int(audit.coins(100_000, seed=3).sum())
    assert abs(heads - 50_000) < 5 * math.sqrt(25_000)  # 6e-7
    assert not torch.equal(audit.coins(100), audit.coins(100))


def test_what_cannot_be_measured_is_refused() -> None:
    scores, included = torch.arange(4.0), torch.tensor([True, False, True, False])
    with pytest.raises(ValueError, match=r"one score and one coin per canary, but scores have shape \(3,\)"):
        audit.measure(scores[:3], included, 2, 0.0)
    with pytest.raises(TypeError, match="included must be bool"):
        audit.measure(scores, included.long(), 2, 0.0)
    with pytest.raises(ValueError, match="1 of 4 scores are NaN"):
        audit.measure(scores.where(scores != 2, torch.nan), included, 2, 0.0)
    with pytest.raises(ValueError, match="guesses must be between 0 and the number of canaries, 4, not 5"):
        audit.measure(scores, included, 5, 0.0)
    with pytest.raises(ValueError, match="of 3 canaries 2 were guessed, 3 of them right"):
        audit.lower_bound(3, 2, 3, 0.0)
    with pytest.raises(ValueError, match=r"delta 1\.5 and confidence 0\.95"):
        audit.lower_bound(3, 2, 1, 1.5)
