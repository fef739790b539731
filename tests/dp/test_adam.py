"""Adam for noisy gradients: against the formula by hand, on noise alone, and told by the run how much there is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample import dp
from tests.dp.helpers import dataset, flat, losses_of, network, plan, private


def by_hand(
    start: list[float],
    gradients: list[list[float]],
    stds: list[float],
    lr: float,
    betas: Any,
    floor: float,
    decay: float,
) -> list[float]:
    """Sums written out, number by number."""
    (b1, b2), p = betas, list(start)
    for t in range(1, len(gradients) + 1):
        first = [(1 - b1) * b1 ** (t - 1 - s) for s in range(t)]
        second = [(1 - b2) * b2 ** (t - 1 - s) for s in range(t)]
        noise = sum(w * stds[s] ** 2 for s, w in enumerate(second))
        for i in range(len(p)):
            m = sum(w * gradients[s][i] for s, w in enumerate(first)) / (1 - b1**t)
            v = (sum(w * gradients[s][i] ** 2 for s, w in enumerate(second)) - noise) / (1 - b2**t)
            p[i] = p[i] * (1 - lr * decay) - lr * m / math.sqrt(max(v, floor**2))
    return p


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("complex_", [False, True])
def test_updates_are_those_of_the_formula(decay: float, complex_: bool) -> None:
    """With noise that changes from step to step, coordinates above the floor and below."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, dtype=torch.float64, generator=generator)
    gradients = torch.randn(7, 6, dtype=torch.float64, generator=generator) * torch.tensor(
        [1.0, 1.0, 0.1, 0.1, 2.0, 0.0]
    )
    stds = [0.1, 0.5, 0.3, 0.0, 0.2, 0.9, 0.1]
    p = nn.Parameter(torch.view_as_complex(start.view(3, 2).clone()) if complex_ else start.clone())
    settings: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "floor": 0.05}
    optimizer = dp.AdamBC([p], **settings, weight_decay=decay)
    for gradient, std in zip(gradients, stds, strict=True):
        p.grad = torch.view_as_complex(gradient.view(3, 2).clone()) if complex_ else gradient.clone()
        optimizer.noise_std = std
        optimizer.step()
    found = torch.view_as_real(p.detach()).flatten() if complex_ else p.detach()
    want = by_hand(start.tolist(), gradients.tolist(), stds, **settings, decay=decay)
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_without_noise_it_is_adam() -> None:
    """But for eps, which Adam adds, and the floor, which is reached from below."""
    ours, theirs = network().double(), network().double()
    optimizers = (
        dp.AdamBC(ours.parameters(), lr=0.01, floor=1e-12),
        torch.optim.Adam(theirs.parameters(), lr=0.01, eps=0),
    )
    optimizers[0].noise_std = 0.0
    x, y = dataset().tensors
    for _ in range(5):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            losses_of(model, (x.double(), y)).mean().backward()
            optimizer.step()
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-9, atol=1e-12)


def corrected(optimizer: dp.AdamBC, p: Tensor) -> Tensor:
    """What is left of the second moment."""
    state, beta2 = optimizer.state[p], optimizer.param_groups[0]["betas"][1]
    return (state["exp_avg_sq"] - state["noise_avg_sq"]) / (1 - beta2 ** float(state["step"]))


def test_of_noise_alone_nothing_is_left() -> None:
    """Over 20000 coordinates of a run whose losses are zero: the mean is within 5 standard errors of 0."""
    model = nn.Linear(20000, 1, bias=False)
    optimizer = dp.AdamBC(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    planned = plan(steps=40, batch_size=12, noise_multiplier=1.5)
    trained = private(model, planned, clip=ps.ClippedSum(0.8), optimizer=optimizer)
    x = torch.utils.data.TensorDataset(torch.zeros(60, 20000))
    for (batch,) in trained.batches(x):
        trained.step(model(batch).squeeze(1))
    assert optimizer.noise_std == pytest.approx(1.5 * 0.8 / 12, rel=1e-3)
    variance = optimizer.noise_std**2
    left, raw = corrected(optimizer, model.weight), optimizer.state[model.weight]["exp_avg_sq"] / (1 - 0.99**40)
    assert float(raw.mean()) == pytest.approx(variance, rel=0.02)
    weights = torch.tensor([0.01 * 0.99**s for s in range(40)]) / (1 - 0.99**40)
    error = variance * math.sqrt(2 * float(weights.square().sum()) / 20000)
    assert abs(float(left.mean())) < 5 * error < 0.02 * variance


@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
@pytest.mark.parametrize(
    "clip",
    [
        ps.ClippedSum(0.3),
        ps.ClippedSum(0.2, per="parameter"),
        dp.ScheduledClip(ps.ClippedSum(0.3), (2.0, 1.0)),
        dp.AdaptiveClip(initial=0.3, rate=1.0),
    ],
    ids=["flat", "groups", "scheduled", "adaptive"],
)
def test_it_is_told_the_noise_of_every_step(clip: Any, sampling: str) -> None:
    """Noise multiplier times what one example moves, over the batch size."""
    model = network()
    optimizer = dp.AdamBC(model.parameters())
    schedule = {"noise_schedule": (1.0, 0.5)} if sampling == "poisson" else {}
    planned = plan(batch_size=20, sampling=sampling, **schedule)
    trained = private(model, planned, clip=clip, optimizer=optimizer)
    seen = set()
    for step, batch in enumerate(trained.batches(dataset())):
        sensitivity = trained._clipper.sensitivity() * (2 if sampling == "shuffled" else 1)
        trained.step(losses_of(model, batch))
        assert optimizer.noise_std == pytest.approx(planned.noise_at(step) * sensitivity / 20, rel=3e-4)
        seen.add(optimizer.noise_std)
    assert (len(seen) == 1) == (not schedule and isinstance(clip, ps.ClippedSum))


def test_released_gradients_have_the_noise_that_was_told() -> None:
    model = nn.Linear(30000, 1, bias=False)
    optimizer = dp.AdamBC(model.parameters())
    trained = private(model, plan(steps=1, noise_multiplier=0.7), clip=ps.ClippedSum(0.3), optimizer=optimizer)
    for (batch,) in trained.batches(torch.utils.data.TensorDataset(torch.zeros(60, 30000))):
        trained.backward(model(batch).squeeze(1))
    assert model.weight.grad is not None
    assert float(model.weight.grad.std()) == pytest.approx(optimizer.noise_std, rel=0.03)


def test_a_resumed_run_has_the_same_averages(tmp_path: Path) -> None:
    model, again = network(), network()
    trained = private(model, optimizer=dp.AdamBC(model.parameters(), floor=0.01))
    for batch in trained.batches(dataset(), steps=3):
        trained.step(losses_of(model, batch))
    trained.save(tmp_path / "run")
    resumed = private(again, optimizer=dp.AdamBC(again.parameters(), floor=7.0))
    resumed.resume(tmp_path / "run")
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(trained._optimizer.state[p], resumed._optimizer.state[q], rtol=0, atol=0)
        assert resumed._optimizer.state[q]["noise_avg_sq"] > 0
    assert resumed._optimizer.param_groups[0]["floor"] == 0.01
    for batch in resumed.batches(dataset()):
        resumed.step(losses_of(again, batch))
    assert resumed.steps == 6


def test_users_and_no_noise() -> None:
    model = network()
    optimizer = dp.AdamBC(model.parameters())
    planned = dp.Plan(users=12, batch_size=4, steps=1, noise_multiplier=0.0, delta=1e-5)
    trained = private(model, planned, optimizer=optimizer)
    for batch in trained.batches(dataset(), users=torch.arange(60) % 12):
        trained.step(losses_of(model, batch))
    assert optimizer.noise_std == 0.0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "lr must be a number that is not negative, not -1.0"),
    ({"floor": 0.0}, "floor must be positive, not 0.0"),
    ({"weight_decay": math.nan}, "weight_decay must be a number that is not negative, not nan"),
    ({"betas": (0.9, 1.0)}, "betas must be two numbers from 0 to below 1"),
    ({"betas": (0.9,)}, "betas must be two numbers"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[m[:15] for _, m in REFUSED])
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dp.AdamBC([nn.Parameter(torch.zeros(1))], **options)


def test_it_has_to_be_told() -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer = dp.AdamBC([p])
    p.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"does not know how much noise.*give it to dp.Private"):
        optimizer.step()
    assert float(p.detach().norm()) == 0


def test_correlated_noise_is_refused() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"dp.AdamBC takes off what independent noise adds.*mechanism='banded'"):
        private(model, plan(mechanism="banded", bands=2), optimizer=dp.AdamBC(model.parameters()))
