"""The demo's own mathematics, against loops and closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persample.demo.data import CLASSES, Digits, flip, load
from persample.demo.noise_scale import Moments, moments, noise_scale
from persample.demo.scores import Evidence, look, look_at_all, mean_cosine, precision, scores
from persample.demo.settings import FULL, QUICK
from persample.demo.training import accuracy, build, losses_fn, train, train_on, train_step
from persample.demo.verify import error, flat, split, verify
from persample.testing import definition


def rows_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Gradients by one backward per sample, (B, all parameters), in double precision."""
    return flat(definition(F.cross_entropy(model(x), y, reduction="none"), model))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(3)
    return build()


def batch(count: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    return torch.rand(count, 1, 8, 8, generator=rng), torch.randint(CLASSES, (count,), generator=rng)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_flipped_labels(share: float) -> None:
    labels = torch.arange(200) % CLASSES
    changed = flip(labels, share, torch.Generator().manual_seed(0))
    assert int((changed != labels).sum()) == round(share * 200)
    assert set(changed.tolist()) <= set(range(CLASSES))
    assert torch.equal(labels, torch.arange(200) % CLASSES)


def test_every_other_class_is_as_likely() -> None:
    """Counts of 9 classes in 90,000 draws: 6 standard deviations off has probability below 2e-8."""
    changed = flip(torch.full((90_000,), 4), 1.0, torch.Generator().manual_seed(0))
    counts = changed.bincount(minlength=CLASSES).double()
    assert counts[4] == 0
    others = counts[torch.arange(CLASSES) != 4]
    assert float((others - 10_000).abs().max()) < 6 * math.sqrt(90_000 * 1 / 9 * 8 / 9)


def test_data_follow_the_seed() -> None:
    one, again, other = (load(360, 0.05, seed) for seed in (0, 0, 1))
    assert torch.equal(one.x, again.x)
    assert torch.equal(one.y, again.y)
    assert not torch.equal(one.true, other.true)
    assert len(one.x) == len(one.y) == 1437
    assert len(one.test_x) == 360
    assert one.x.min() >= 0
    assert one.x.max() <= 1
    assert int(one.flipped.sum()) == 72


@pytest.mark.parametrize("count", [2, 7])
def test_moments_of_everything_are_exact(count: int, model: nn.Module) -> None:
    rows = rows_of(model, *batch(count))
    mean = split(rows.mean(0), model)
    found = moments(rows.norm(dim=1), mean, count)
    assert found.trace == pytest.approx(float(rows.var(0).sum()), rel=1e-5)
    assert found.square == pytest.approx(float(rows.mean(0).square().sum()), rel=1e-5)


def test_moments_of_batches_are_unbiased() -> None:
    """Their mean over all 15 pairs of 6 vectors is that of the 6."""
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = [moments(some.norm(dim=1), {"p": some.mean(0)}, 6) for some in rows[torch.combinations(torch.arange(6))]]
    exact = moments(rows.norm(dim=1), {"p": rows.mean(0)}, 6)
    for values, want in zip(zip(*pairs, strict=True), exact, strict=True):
        assert sum(values) / 15 == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("count", [0, 1])
def test_one_sample_has_no_variance(count: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 samples, and the batch has {count}"):
        moments(torch.ones(count), {"p": torch.ones(3)}, 10)


def test_noise_scale_is_a_ratio_of_means() -> None:
    assert noise_scale([Moments(1.0, 1.0), Moments(3.0, 0.0)]) == 4.0
    assert math.isnan(noise_scale([Moments(1.0, -2.0), Moments(1.0, 1.0)]))


def test_a_step_is_an_ordinary_step(model: nn.Module) -> None:
    x, y = batch(9)
    torch.manual_seed(3)
    plain = build()
    rows = rows_of(model, x, y)
    found = train_step(losses_fn(model, (x, y)), model, torch.optim.SGD(model.parameters(), lr=0.1), 100)
    F.cross_entropy(plain(x), y).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    assert found.trace == pytest.approx(float(rows.var(0).sum()), rel=1e-4)


def test_training_on_everything_is_the_recorded_run(tmp_path: Path) -> None:
    digits, one_epoch = load(1500, 0.05, 0), replace(QUICK, epochs=1)
    (epoch,) = train(digits, one_epoch, 3, tmp_path, lambda: None)
    again = train_on(torch.arange(len(digits.x)), digits, one_epoch, 3)
    for p, q in zip(epoch.model.parameters(), again.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-5)


def test_what_is_left_out_does_not_count() -> None:
    """Another image in its place changes nothing, and it did count before."""
    digits, one_epoch = load(1500, 0.05, 0), replace(QUICK, epochs=1)
    other = replace(digits, x=digits.x.clone())
    other.x[7] = 1 - other.x[7]
    kept = torch.tensor([i for i in range(len(digits.x)) if i != 7])
    one, same = (train_on(kept, each, one_epoch, 0)[0].weight for each in (digits, other))
    full, different = (train_on(torch.arange(len(digits.x)), each, one_epoch, 0)[0].weight for each in (digits, other))
    assert torch.equal(one, same)
    assert not torch.equal(full, different)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_what_is_seen(count: int, model: nn.Module) -> None:
    x, _ = batch(count)
    y = torch.full((count,), 3)
    evidence, mean = look(model, x, y)
    rows = rows_of(model, x, y)
    cosines = F.cosine_similarity(rows.unsqueeze(0), rows.unsqueeze(1), dim=2)
    want = (cosines.sum(1) - 1) / max(1, count - 1)
    assert torch.allclose(evidence.losses, F.cross_entropy(model(x), y, reduction="none"))
    assert error(evidence.norms, rows.norm(dim=1)) < 1e-5
    assert torch.allclose(evidence.cosines.double(), want, atol=1e-5)
    assert error(flat(mean, 0), rows.mean(0)) < 1e-5


def test_a_gradient_of_zeros_agrees_with_nobody() -> None:
    found = mean_cosine(torch.tensor([0.0, 2.0, 1.0]), torch.tensor([0.0, 4.0, 2.0]))  # the others point the same way
    assert found.tolist() == [0.0, 0.5, 0.5]


def test_looking_at_all_is_looking_at_each_class(model: nn.Module) -> None:
    x, _ = batch(20)
    y = torch.arange(20) % CLASSES
    evidence, found = look_at_all(model, Digits(x, y, y, x, y))
    rows = rows_of(model, x, y)
    assert error(evidence.norms, rows.norm(dim=1)) < 1e-5
    want = F.cosine_similarity(rows[3], rows[13], dim=0)
    assert evidence.cosines[[3, 13]].tolist() == pytest.approx([float(want)] * 2, abs=1e-5)
    assert found.square == pytest.approx(float(rows.mean(0).square().sum()), rel=1e-4)


def test_scores_by_hand() -> None:
    history = [
        Evidence(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0]), torch.tensor([0.5, 0.0])),
        Evidence(torch.tensor([3.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0])),
    ]
    found = scores(history, [0.5, 0.25])
    assert found["norms"].values.tolist() == [2.0, 1.5]
    assert found["influence"].values.tolist() == [0.5 * 9 + 0.25, 0.5 + 0.25 * 4]
    assert found["agreement"].values.tolist() == [-0.5, 0.5]
    assert found["loss"].values.tolist() == [2.0, 2.0]
    assert found["agreement"].order.tolist() == [1, 0]
    assert [name for name, score in found.items() if not score.gradients] == ["loss"]


def test_precision() -> None:
    order, flipped = torch.tensor([2, 0, 1, 3]), torch.tensor([False, True, True, False])
    assert [precision(order, flipped, k) for k in (1, 2, 4)] == [1.0, 0.5, 0.5]


def test_a_right_model_is_verified(model: nn.Module) -> None:
    verdict = verify(model, *batch(5), max_norm=0.5)
    assert verdict.ok
    assert all(e < 1e-5 for e in verdict.reductions.values())


def test_errors_are_relative_and_nan_is_infinite() -> None:
    assert error(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0])) == 0.25
    assert error(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 4.0])) == math.inf


@pytest.mark.slow
def test_gradients_find_most_flipped_labels(tmp_path: Path) -> None:
    """Ordinary training as in the full run: far better than chance, by every score."""
    digits = load(FULL.test, FULL.flipped, 0)
    epochs = train(digits, FULL, 0, tmp_path, lambda: None)
    trained = epochs[-1].model
    ranked = scores([look_at_all(e.model, digits)[0] for e in epochs], [e.lr for e in epochs])
    found = {name: precision(score.order, digits.flipped, 72) for name, score in ranked.items()}
    assert min(found.values()) > 0.6
    assert found["influence"] > 0.8
    assert accuracy(trained, digits.test_x, digits.test_y) > 0.93
