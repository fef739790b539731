"""Every way to clip, and the bound that follows a quantile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import persample as ps
from persample import dp
from persample.dp.clips import Following
from persample.dp.sources import Seeded
from tests.dp.helpers import dataset, flat, losses_of, network, plan, private


def clips(model: nn.Module) -> dict[str, tuple[Any, float]]:
    """Clips of all kinds, and their sensitivities."""
    layers = [model[0], model[2]]  # type: ignore[index]
    return {
        "flat": (ps.ClippedSum(0.3), 0.3),
        "per parameter": (ps.ClippedSum(0.2, per="parameter"), 0.4),
        "per parameter, bounds": (
            ps.ClippedSum({"0.weight": 0.1, "0.bias": 0.2, "2.weight": 0.2, "2.bias": 0.4}, per="parameter"),
            0.5,
        ),
        "per layer": (ps.ClippedSum([0.3, 0.4], per=layers), 0.5),
        "groups by name": (
            ps.ClippedSum(0.3, per={"w": ["0.weight", "2.weight"], "b": ["0.bias", "2.bias"]}),
            0.3 * math.sqrt(2),
        ),
        "automatic": (ps.ClippedSum(0.3, gamma=0.01), 0.3),
        "weights": (ps.ClippedSum(weights=lambda n: 0.3 / (1 + n), sensitivity=0.3), 0.3),
    }


@pytest.mark.filterwarnings("ignore::persample.dp.PrivacyWarning")
@pytest.mark.parametrize("name", list(clips(network())))
@pytest.mark.parametrize("physical", [None, 7])
def test_sums_are_the_reductions_and_noise_is_scaled_by_its_sensitivity(name: str, physical: int | None) -> None:
    model = network()
    clip, sensitivity = clips(model)[name]
    trained = private(model, plan(batch_size=60, steps=1), clip=clip)
    assert trained._clipper.sensitivity() == pytest.approx(sensitivity)
    bare = private(model, plan(batch_size=60, steps=1, noise_multiplier=0.0), clip=clip)
    unit = private(model, plan(batch_size=60, steps=1), clip=ps.ClippedSum(1.0))
    found = []
    for run in (trained, bare, unit):
        run._source = Seeded(0)  # those of runs with different clips are never the same
        for batch in run.batches(dataset(), physical_batch_size=physical):
            run.backward(losses_of(model, batch))
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    expected = ps.reduce(losses_of(model, dataset().tensors), model, clip)[0]
    torch.testing.assert_close(found[1], torch.cat([t.flatten() for t in expected.values()]) / 60, atol=1e-5, rtol=1e-4)
    clean = ps.clipped_sum(losses_of(model, dataset().tensors), model, max_norm=1.0)
    noise = found[2] - torch.cat([t.flatten() for t in clean.values()]) / 60
    torch.testing.assert_close(found[0] - found[1], noise * sensitivity, atol=1e-4, rtol=1e-3)


def test_a_stated_sensitivity_is_checked() -> None:
    model = network()
    before = flat(model)
    trained = private(model, clip=ps.ClippedSum(weights=torch.ones_like, sensitivity=0.01))
    for batch in trained.batches(dataset()):
        with pytest.raises(dp.PrivacyError, match=r"more than the sensitivity 0.01 that was stated"):
            trained.step(losses_of(model, batch))
        break
    assert torch.equal(before, flat(model))
    assert trained.steps == 0


WEIGHTS_BY_OTHERS: dict[str, Any] = {
    "quantile": lambda n: 0.3 / n.clamp(min=float(n.quantile(0.5))),
    "mean": lambda n: 0.3 / (n + n.mean()),
    "count": lambda n: 0.3 / (n * len(n)),
    "place": lambda n: 0.3 / (n * torch.arange(1.0, len(n) + 1)),
}


@pytest.mark.parametrize("kind", WEIGHTS_BY_OTHERS)
@pytest.mark.parametrize("per", [None, "parameter"])
def test_weights_that_follow_from_other_samples_are_refused(kind: str, per: Any) -> None:
    """One sample more would move what all others add, each within the sensitivity that is stated."""
    model = network()
    before = flat(model)
    trained = private(model, clip=ps.ClippedSum(weights=WEIGHTS_BY_OTHERS[kind], per=per, sensitivity=1.0))
    for batch in trained.batches(dataset()):
        with pytest.raises(ps.InteractionError, match="samples interact in the function that was given for weights"):
            trained.step(losses_of(model, batch))
        break
    assert torch.equal(before, flat(model))
    assert trained.steps == 0


@pytest.mark.parametrize(("rate", "count_noise"), [(5.0, 200.0), (100.0, 1000.0), (1e300, None)])
def test_bounds_that_noise_moves_far_stay_in_their_range(rate: float, count_noise: float | None) -> None:
    model = network()
    clip = dp.AdaptiveClip(rate=rate, count_noise=count_noise)
    trained = private(model, plan(batch_size=1, steps=20), clip=clip)
    for batch in trained.batches(dataset()):
        trained.step(losses_of(model, batch))
        assert isinstance(trained.bound, float)
        assert 1e-10 <= trained.bound <= 1e10
    assert trained.steps == 20


def test_bounds_of_groups_that_change_are_seen() -> None:
    model = network()
    bounds = [0.3, 0.4]
    trained = private(model, clip=ps.ClippedSum(bounds, per=[model[0], model[2]]))  # type: ignore[index]
    for batch in trained.batches(dataset()):
        bounds[0] = 30.0
        with pytest.raises(dp.PrivacyError, match="the clip was changed"):
            trained.step(losses_of(model, batch))
        break


def test_bounds_that_are_shown_are_not_those_that_are_used() -> None:
    trained = private(clip=dp.AdaptiveClip(initial=0.5, per="parameter"))
    shown = trained.bound
    assert isinstance(shown, list)
    shown[0] = 1e9
    assert trained.bound == [0.5] * 4


@pytest.mark.parametrize("kind", ["list", "dict", "scheduled"])
def test_bounds_of_groups_that_change_are_seen_where_their_norm_stays(kind: str) -> None:
    """Sums would be in other units than noise is for: 0.28 counted as 0.56."""
    model = network()
    bounds: Any = {"a": 0.6, "b": 0.8} if kind == "dict" else [0.6, 0.8]
    groups = [model[0], model[2]]  # type: ignore[index]
    clip: Any = ps.ClippedSum(bounds, per=dict(zip("ab", groups, strict=True)) if kind == "dict" else groups)
    trained = private(model, clip=dp.ScheduledClip(clip, (1.0,)) if kind == "scheduled" else clip)
    for batch in trained.batches(dataset()):
        for key, bound in zip(["a", "b"] if kind == "dict" else [0, 1], [0.28, 0.96], strict=True):
            bounds[key] = bound
        with pytest.raises(dp.PrivacyError, match="the clip was changed"):
            trained.step(losses_of(model, batch))
        break
    assert trained.steps == 0


class Scaled(nn.Module):
    """Sample i's gradient has the norm of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_the_bound_comes_to_the_quantile(quantile: float, sampling: str) -> None:
    """Norms are 1 … 400: with noise of 2 on a count of about 200, the bound ends near the quantile."""
    data = torch.utils.data.TensorDataset(torch.arange(1.0, 401.0).unsqueeze(1))
    model = Scaled()
    clip = dp.AdaptiveClip(initial=1.0, quantile=quantile, rate=0.3, count_noise=2.0)
    trained = private(model, plan(examples=400, batch_size=200, steps=120, sampling=sampling), clip=clip)
    for (x,) in trained.batches(data):
        trained.step(model(x))
    assert trained.bound == pytest.approx(400 * quantile, rel=0.15)
    assert trained.spent().epsilon == trained.plan.epsilon  # the count is paid for by noise, not by more epsilon


def test_the_budget_is_shared_between_sum_and_count() -> None:
    """The stated noise on the count, and (z⁻² - (2 σ_b)⁻²)^(-1/2) on the gradients: together the plan's z."""
    z, sigma, bound = 1.5, 4.0, 0.7
    following = Following(dp.AdaptiveClip(initial=bound, count_noise=sigma), plan(noise_multiplier=z))
    std = z * following.sensitivity()
    assert std / following._kappa == pytest.approx(sigma)
    assert std / bound == pytest.approx((z**-2 - (2 * sigma) ** -2) ** -0.5)
    assert ((std / bound) ** -2 + (2 * sigma) ** -2) ** -0.5 == pytest.approx(z)


def test_the_count_moves_by_no_more_than_is_accounted() -> None:
    """One sample more or less moves (sum, count) by the joint sensitivity at most, clipped or not."""
    following = Following(dp.AdaptiveClip(initial=1.0, count_noise=3.0), plan())
    for norm in (0.0, 0.5, 1.0, 7.0, math.nan):
        alone = following.count(ps.Clipping(torch.tensor([norm]), torch.ones(1)))
        assert alone is not None
        moved = math.hypot(min(norm, 1.0) if norm == norm else 0.0, float(alone) * following.counted_in.size)
        assert moved <= following.sensitivity() + 1e-12


def test_an_empty_batch_moves_the_bound_by_noise_alone() -> None:
    model = network()
    trained = private(
        model, plan(batch_size=1, steps=30), clip=dp.AdaptiveClip(initial=0.5, count_noise=3.0), check_every=0
    )
    for batch in trained.batches(dataset()):
        trained.step(losses_of(model, batch))
    assert trained.steps == 30
    assert trained.bound != 0.5


def test_adaptive_bounds_without_noise_follow_the_counts() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(1.0, 11.0).unsqueeze(1))
    model = Scaled()
    clip = dp.AdaptiveClip(initial=4.0, quantile=0.5, rate=1.0)
    trained = private(model, plan(examples=10, batch_size=10, steps=1, noise_multiplier=0.0), clip=clip)
    for (x,) in trained.batches(data):
        trained.step(model(x))
    assert trained.bound == pytest.approx(4.0 * math.exp(-(0.4 - 0.5)))


GROUPS: dict[str, Any] = {
    "parameter": "parameter",
    "list": [["0.weight", "0.bias"], ["2.weight", "2.bias"]],
    "dict": {"w": ["0.weight", "2.weight"], "b": ["0.bias", "2.bias"]},
}


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("physical", [None, 7])
def test_bounds_of_groups_follow_their_counts(kind: str, physical: int | None) -> None:
    """Without noise: the bound of every group moves by the share of samples whose part of it is below."""
    model, per = network(), GROUPS[kind]
    clip = dp.AdaptiveClip(initial=0.9, quantile=0.3, rate=1.0, per=per)
    trained = private(model, plan(batch_size=60, steps=1, noise_multiplier=0.0), clip=clip)
    norms = ps.norms(losses_of(model, dataset().tensors), model, per=per)
    shares = [float((n <= 0.9).double().mean()) for n in (norms.values() if isinstance(norms, dict) else norms)]
    assert len(set(shares)) > 1
    assert trained.bound == [0.9] * len(shares)
    for batch in trained.batches(dataset(), physical_batch_size=physical):
        trained.step(losses_of(model, batch))
    assert trained.bound == pytest.approx([0.9 * math.exp(0.3 - share) for share in shares])


class ScaledTwice(nn.Module):
    """Of sample i, one gradient is ten times as long as the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first + 10 * x @ self.second


def test_bounds_of_groups_come_to_their_quantiles() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(1.0, 401.0).unsqueeze(1))
    model = ScaledTwice()
    clip = dp.AdaptiveClip(initial=[1.0, 20.0], quantile=0.5, rate=0.3, count_noise=3.0, per="parameter")
    trained = private(model, plan(examples=400, batch_size=200, steps=120), clip=clip)
    for (x,) in trained.batches(data):
        trained.step(model(x))
    assert trained.bound == pytest.approx([200, 2000], rel=0.2)
    assert trained.spent().epsilon == trained.plan.epsilon


@pytest.mark.parametrize("kind", GROUPS)
def test_the_budget_is_shared_between_the_sum_and_all_counts(kind: str) -> None:
    """The stated noise on every count, and (z⁻² - G (2 σ_b)⁻²)^(-1/2) on the gradients: together the plan's z."""
    z, sigma = 1.5, 4.0
    clip = dp.AdaptiveClip(initial=0.7, count_noise=sigma, per=GROUPS[kind])
    following = Following(clip, plan(noise_multiplier=z), dict(network().named_parameters()))
    count = {"parameter": 4}.get(kind, 2)
    std, bound = z * following.sensitivity(), 0.7 * math.sqrt(count)
    assert following.counts == count
    assert std / following._kappa == pytest.approx(sigma)
    assert std / bound == pytest.approx((z**-2 - count * (2 * sigma) ** -2) ** -0.5)


def test_counts_of_groups_move_by_no_more_than_is_accounted() -> None:
    """One sample more or less moves (sums, counts) by the joint sensitivity at most, whatever is clipped."""
    params = dict(network().named_parameters())
    clip = dp.AdaptiveClip(initial=[1.0, 2.0], count_noise=3.0, per=GROUPS["list"])
    following = Following(clip, plan(), params)
    for norms in ((0.0, 0.0), (1.0, 2.0), (7.0, 0.5), (9.0, 9.0), (math.nan, 1.0)):
        each = tuple(torch.tensor([norm]) for norm in norms)
        alone = following.count(ps.Clipping(each, each))
        assert alone is not None
        parts = [min(n, b) if n == n else 0.0 for n, b in zip(norms, (1.0, 2.0), strict=True)]
        moved = math.hypot(*parts, *[float(c) * following.counted_in.size for c in alone])
        assert moved <= following.sensitivity() + 1e-12


def test_bounds_of_groups_are_saved(tmp_path: Path) -> None:
    clip = dp.AdaptiveClip(initial=0.3, per="parameter")
    trained = private(clip=clip)
    for batch in trained.batches(dataset(), steps=3):
        trained.step(losses_of(trained._model, batch))
    trained.save(tmp_path / "run")
    resumed = private(clip=clip)
    resumed.resume(tmp_path / "run")
    assert resumed.bound == trained.bound != [0.3] * 4
    state = trained.state_dict()
    for wrong in ([0.3] * 3, 0.3, None):
        with pytest.raises(ValueError, match="the state of private training is damaged: its bound"):
            private(clip=clip).load_state_dict({**state, "bound": wrong})
    for wrong in ([], [0.3, -1.0, 0.3, 0.3], [True] * 4):
        with pytest.raises(ValueError, match="the state of private training is damaged"):
            private(clip=clip).load_state_dict({**state, "bound": wrong})
    with pytest.raises(dp.PrivacyError, match=r"another run.*clip"):
        private(clip=dp.AdaptiveClip(initial=0.3)).load_state_dict(state)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"initial": [0.3, 0.4], "per": "parameter"}, "one bound per group: expected 4, got 2"),
    ({"initial": {"w": 0.3, "x": 0.4}, "per": GROUPS["dict"]}, "one bound per group"),
    ({"per": [["0.weight"]]}, "must hold every parameter once"),
    ({"per": "layer"}, "per must be None, 'parameter', a list of groups"),
    ({"count_noise": 0.9, "per": "parameter"}, "larger than half of the plan's noise multiplier times the root"),
    ({"initial": 0.0}, "max_norm must be positive"),
    ({"quantile": 1.5}, "quantile must lie between 0 and 1, not 1.5"),
    ({"rate": 0.0}, "rate must be positive and finite"),
    ({"count_noise": -1.0}, "count_noise must be positive and finite"),
    ({"nonfinite": "keep"}, "nonfinite must be 'raise' or 'drop'"),
    ({"count_noise": 0.4}, "count_noise 0.4 would take the whole budget"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[m[:20] for _, m in REFUSED])
def test_wrong_options_of_adaptive_clips_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        private(clip=dp.AdaptiveClip(**options))


OUT_OF_RANGE: dict[str, Any] = {
    "tiny": ps.ClippedSum(1e-300),
    "huge": ps.ClippedSum(1e200),
    "one of several": ps.ClippedSum(
        {"0.weight": 1.0, "0.bias": 1e-31, "2.weight": 1.0, "2.bias": 1.0}, per="parameter"
    ),
    "stated": ps.ClippedSum(weights=torch.zeros_like, sensitivity=1e31),
    "adaptive, tiny": dp.AdaptiveClip(initial=1e-300),
    "adaptive, huge": dp.AdaptiveClip(initial=1e11),
    "scheduled": dp.ScheduledClip(ps.ClippedSum(1.0), (1.0, 1e-31)),
}


@pytest.mark.parametrize("kind", OUT_OF_RANGE)
def test_bounds_that_vanish_or_overflow_are_refused(kind: str) -> None:
    least, most = (1e-10, 1e10) if "adaptive" in kind else (1e-30, 1e30)
    message = rf"bounds of private sums must lie between {least:g} and {most:g}".replace("+", r"\+")
    with pytest.raises(ValueError, match=message):
        private(clip=OUT_OF_RANGE[kind])


@pytest.mark.parametrize("bound", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_at_the_ends_of_their_range_are_kept(bound: float, dtype: torch.dtype) -> None:
    """The noise has the size of the bound, and the sum of clipped gradients is theirs."""
    x, found = torch.randn(64, 4, dtype=dtype), []
    for noise in (0.0, 1.0):
        torch.manual_seed(0)
        model = nn.Linear(4, 3, dtype=dtype)
        plan_ = dp.Plan(examples=64, batch_size=64, steps=1, sampling="cyclic", noise_multiplier=noise, delta=1e-5)
        run = dp.Private(model, torch.optim.SGD(model.parameters(), lr=0.0), plan_, ps.ClippedSum(bound))
        for (inputs,) in run.batches(TensorDataset(x)):
            run.backward(model(inputs).square().sum(1) * 3.0)
        gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
        found.append(torch.cat(gradients) * 64 / bound)
    want = ps.clipped_sum(model(x).square().sum(1) * 3.0, model, max_norm=bound)
    exact = torch.cat([t.double().flatten() for t in want.values()]) / bound
    torch.testing.assert_close(found[0], exact, rtol=1e-3, atol=1e-4)
    assert 0.3 < float((found[1] - found[0]).std()) < 3
