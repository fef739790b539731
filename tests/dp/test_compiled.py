"""Private training on compiled steps: the same accounts, checks and, up to rounding, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import persample as ps
from persample import dp
from tests.dp.helpers import CLASSES, EXAMPLES, WIDTH, dataset, losses_of, network, plan, private

STRANGE = torch.ones(WIDTH, requires_grad=True)
CLIPS = {
    "flat": ps.ClippedSum(0.3),
    "automatic": ps.ClippedSum(0.3, gamma=0.01),
    "per parameter": ps.ClippedSum(0.2, per="parameter"),
    "groups": ps.ClippedSum([0.2, 0.4], per=[["0.weight", "0.bias"], ["2.weight", "2.bias"]]),
    "adaptive": dp.AdaptiveClip(initial=0.3, quantile=0.7, rate=2.0),
}


def compiled(model: nn.Module, *, backend: Any = "aot_eager", **more: Any) -> dp.Private:
    return private(model, compile=lambda x, y: losses_of(model, (x, y)), backend=backend, **more)


def gradients(run: dp.Private, model: nn.Module, batch: Any, *, whole: bool) -> tuple[dict[str, Tensor], dp.Step]:
    record = run.backward(*batch) if whole else run.backward(losses_of(model, batch))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, record


def train(run: dp.Private, data: TensorDataset, **options: Any) -> None:
    for batch in run.batches(data, **options):
        run.step(*batch)


def assert_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    for name, want in theirs.items():
        torch.testing.assert_close(ours[name], want, rtol=0, atol=1e-5 * bound)


QUICK_AND_SLOW = [
    name if name in ("flat", "adaptive") else pytest.param(name, marks=pytest.mark.slow) for name in CLIPS
]


@pytest.mark.parametrize("name", QUICK_AND_SLOW)
def test_steps_are_those_of_the_eager_engine(name: str) -> None:
    models = network(), network()
    plain, fast = private(models[0], clip=CLIPS[name]), compiled(models[1], clip=CLIPS[name])
    sizes = set()
    for batch, same in zip(plain.batches(dataset()), fast.batches(dataset()), strict=True):
        (want, record), (got, other) = (
            gradients(run, model, b, whole=whole)
            for run, model, b, whole in ((plain, models[0], batch, False), (fast, models[1], same, True))
        )
        assert record == other
        assert_alike(got, want, 0.3)
        sizes.add(record.size)
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert len(sizes) > 2
    assert plain.spent() == fast.spent()
    assert plain.bound == pytest.approx(fast.bound) if plain.bound else fast.bound is None
    steps = fast._compiled
    assert steps is not None
    assert (steps.refused, len(steps.builds), steps.doubts) == (None, 1, 0)


def whole_sums(run: dp.Private, batch: Any, padding: int = 0) -> dict[str, Tensor]:
    """What a batch adds, by the compiled step of a run."""
    from persample.dp.given import Given
    from persample.dp.sampling import BatchPart

    assert run._compiled is not None
    part = BatchPart(0, len(batch[0]), True, padding=padding)
    found = run._compiled.sums(Given(batch, {}), part, run._clipper, run._physical, varies=True)
    return run._mechanism.sums._parted(found.line)


def extreme() -> tuple[Tensor, Tensor]:
    """Ordinary samples, and one of every kind that needs another way; at the end, ordinary ones."""
    x, y = (t.clone() for t in dataset().tensors[:2])
    x, y = x[:12], y[:12]
    x[3] = math.nan
    x[4] = math.inf
    x[5] = 1e30
    x[6] = 1e-30
    x[7] = 0
    x[8] = 1e-42
    return x, y


@pytest.mark.parametrize("name", QUICK_AND_SLOW)
def test_what_a_sample_adds_does_not_depend_on_others(name: str) -> None:
    """With any of the samples dropped, the others' numbers stay, to the bit; and none adds more than its bound."""
    clip = CLIPS[name]
    model = network()
    if isinstance(clip, ps.ClippedSum):
        clip = ps.ClippedSum(clip.max_norm, per=clip.per, gamma=clip.gamma, nonfinite="drop")
    else:
        clip = dp.AdaptiveClip(initial=0.3, quantile=0.7, nonfinite="drop")
    run = compiled(model, clip=clip)
    x, y = extreme()
    every = whole_sums(run, (x, y))
    bound = run._clipper.sensitivity()
    units = run._mechanism.exactly().units_for(dict(model.named_parameters()))
    added = {name: torch.zeros_like(t) for name, t in every.items()}
    for one in range(len(x)):
        without = x.clone()
        without[one] = math.nan
        rest = whole_sums(run, (without, y))
        share = {name: every[name] - rest[name] for name in every}
        assert float(torch.cat([(share[n] * units[n].size).flatten() for n in every]).norm()) <= bound
        added = {name: added[name] + share[name] for name in every}
    assert all(torch.equal(added[name], every[name]) for name in every)
    for one in range(len(x)):
        alone = whole_sums(run, (x[[one, one]], y[[one, one]]), padding=1)
        assert float(torch.cat([(alone[n] * units[n].size).flatten() for n in every]).norm()) <= bound
    assert run._compiled is not None
    assert run._compiled.doubts > 0
    assert len(run._compiled.builds) == 1


class Centered(nn.Module):
    """Samples interact, and the graph shows nothing of it if the mean is detached."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.linear, self.detached = nn.Linear(WIDTH, CLASSES), detached

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        mean = h.mean(0)
        return h - (mean.detach() if self.detached else mean)


@pytest.mark.parametrize("detached", [True, False])
def test_samples_that_interact_are_refused(detached: bool) -> None:
    run = compiled(Centered(detached))
    with pytest.raises(ps.InteractionError, match="interact"):
        train(run, dataset())
    assert run.steps == 0


def test_wrong_use() -> None:
    model = network()
    with pytest.raises(TypeError, match="compile must be a function from a batch to losses, not a bool"):
        private(model, compile=True)
    run, plain = compiled(network()), private(model)
    for batch in run.batches(dataset()):
        with pytest.raises(TypeError, match="compiled steps take the batch, not its losses"):
            run.step(losses_of(network(), batch))
        with pytest.raises(dp.PrivacyError, match="there are 2 losses"):
            run.step(*[t[:2] for t in batch])
        run.step(*batch)
        break
    for batch in plain.batches(dataset()):
        with pytest.raises(TypeError, match="takes the losses of its batch, one tensor, but got 2 arguments"):
            plain.step(*batch)
        plain.step(losses=losses_of(model, batch))
        break
    assert run.steps == plain.steps == 1


@pytest.mark.parametrize(
    ("losses_fn", "error", "match"),
    [
        (lambda x, y: x.sum(), ValueError, "shape"),
        (lambda x, y: F.linear(x, torch.ones(1, WIDTH)), ValueError, "shape"),
        (lambda x, y: x.sum(1), RuntimeError, "no graph"),
        (lambda x, y: None, TypeError, "must be a tensor"),
        (lambda x, y: (x * STRANGE).sum(1), dp.PrivacyError, "depend on none of the trainable parameters"),
    ],
)
def test_functions_that_give_no_losses(losses_fn: Any, error: type[Exception], match: str) -> None:
    run = private(network(), compile=losses_fn, backend="eager")
    with pytest.raises(error, match=match):
        train(run, dataset())
    assert run.steps == 0


def test_dropped_samples_are_counted() -> None:
    data = dataset()
    x, y = data.tensors[0].clone(), data.tensors[1]
    x[::5] = math.nan
    models = network(), network()
    clip = ps.ClippedSum(0.3, nonfinite="drop")
    plain, fast = private(models[0], clip=clip), compiled(models[1], clip=clip)
    for batch in plain.batches(TensorDataset(x, y)):
        plain.step(losses_of(models[0], batch))
    for batch in fast.batches(TensorDataset(x, y)):
        fast.step(*batch)
    assert plain.dropped == fast.dropped > 0
    assert_alike(dict(models[1].named_parameters()), dict(models[0].named_parameters()), 1)


def test_samples_that_are_not_finite_are_named() -> None:
    run = compiled(network())
    batches = run.batches(dataset())
    run.step(*next(batches))
    x, y = next(batches)
    x[3] = math.inf
    with pytest.raises(ps.NonFiniteError, match=f"of 1 of {len(x)} samples are not finite: 3"):
        run.step(x, y)
    assert run.steps == 1


def test_small_and_empty_batches() -> None:
    """Batches of no sample, of one and of two, each alike with and without a compiler."""
    models, few = (network(), network()), plan(batch_size=1, steps=12)
    plain, fast = private(models[0], few), compiled(models[1], plan_=few)
    records = []
    for batch in plain.batches(dataset()):
        records.append(plain.step(losses_of(models[0], batch)))
    for batch, record in zip(fast.batches(dataset()), records, strict=True):
        assert fast.step(*batch) == record
    assert {0, 1, 2} <= {record.size for record in records}
    assert_alike(dict(models[1].named_parameters()), dict(models[0].named_parameters()), 1)


@pytest.mark.parametrize("physical", [1, 5])
def test_parts_of_batches(physical: int) -> None:
    models = network(), network()
    plain, fast = private(models[0]), compiled(models[1])
    for batch in plain.batches(dataset(), physical_batch_size=physical, steps=2):
        plain.step(losses_of(models[0], batch))
    for batch in fast.batches(dataset(), physical_batch_size=physical, steps=2):
        fast.step(*batch)
    assert_alike(dict(models[1].named_parameters()), dict(models[0].named_parameters()), 1)


def test_one_process_alone() -> None:
    class Two(dp.Team):
        size = 2

    with pytest.raises(ValueError, match="compile= is for one process"):
        compiled(network(), team=Two())


def test_what_cannot_be_captured_is_left_to_the_eager_engine() -> None:
    models = network(), network()

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return losses_of(models[1], (x, y)) * (1.0 if float(x.sum()) > 0 else 2.0) * 0 + losses_of(models[1], (x, y))

    plain, fast = private(models[0]), private(models[1], compile=losses, backend="eager")
    for batch in plain.batches(dataset(), steps=2):
        plain.step(losses_of(models[0], batch))
    with pytest.warns(ps.PerformanceWarning, match="leaves the work to the eager engine"):
        train(fast, dataset(), steps=2)
    assert_alike(dict(models[1].named_parameters()), dict(models[0].named_parameters()), 1)


def test_a_forward_pass_that_changes_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(EXAMPLES, 4, max_norm=0.1), nn.Flatten(), nn.Linear(4, CLASSES))
    data = TensorDataset(torch.arange(EXAMPLES).unsqueeze(1), torch.zeros(EXAMPLES, dtype=torch.long))
    run = compiled(model)
    with pytest.raises(dp.PrivacyError, match="were changed between"):
        train(run, data)
    assert run.steps == 0
