"""From an existing loop: plans like a DataLoader, its options, and epochs of its length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from persample import dp
from persample.dp.epochs import lengths
from tests.dp.helpers import dataset, flat, losses_of, network, plan, private

SETTINGS: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(options.pop("data", dataset()), **{"batch_size": 13, **options})


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_plan_has_as_many_steps_as_the_loop(drop_last: bool) -> None:
    like = loader(shuffle=True, drop_last=drop_last)
    for epochs, steps in ((1, len(like)), (3, 3 * len(like)), (0.5, -(-len(like) // 2))):
        found = dp.Plan.like(like, epochs=epochs, **SETTINGS)
        assert (found.examples, found.batch_size, found.steps) == (60, 13, steps)
        assert found == dp.Plan(examples=60, batch_size=13, steps=steps, **SETTINGS)
    assert len(like) == (4 if drop_last else 5)


def test_noise_and_length_are_solved_as_ever() -> None:
    like = loader()
    assert dp.Plan.like(like, epochs=2, epsilon=4.0, delta=1e-5, accountant="rdp").solved == "noise_multiplier"
    assert dp.Plan.like(like, epsilon=20.0, **SETTINGS).solved == "steps"
    assert dp.Plan.like(like, steps=7, **SETTINGS).steps == 7
    assert dp.Plan.like(like, epochs=2, sampling="shuffled", **SETTINGS).steps == 10
    assert dp.Plan.like(loader(data=Subset(dataset(), range(26))), epochs=2, **SETTINGS).examples == 26


def epochs_of(trained: dp.Private, data: Any, **options: Any) -> list[int]:
    """The steps of every epoch."""
    found = []
    for epoch in trained.epochs(data, **options):
        before = trained.steps
        for batch in epoch:
            trained.step(losses_of(trained._model, batch))
        found.append(trained.steps - before)
    return found


@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs_are_those_of_the_loader(drop_last: bool) -> None:
    like = loader(drop_last=drop_last)
    trained = private(plan_=dp.Plan.like(like, epochs=2.5, **SETTINGS))
    assert epochs_of(trained, like) == ([4, 4, 2] if drop_last else [5, 5, 3])
    assert epochs_of(trained, like) == []
    assert trained.steps == trained.plan.steps


def test_epochs_are_one_long_loop() -> None:
    whole, parts = network(), network()
    trained = private(whole, plan())
    for batch in trained.batches(dataset()):
        trained.step(losses_of(whole, batch))
    assert epochs_of(private(parts, plan()), dataset()) == [5, 1]
    assert torch.equal(flat(whole), flat(parts))


@pytest.mark.parametrize("sampling", ["shuffled", "cyclic"])
def test_passes_are_epochs(sampling: str) -> None:
    like = loader()
    trained = private(plan_=dp.Plan.like(like, epochs=2, sampling=sampling, **SETTINGS))
    assert epochs_of(trained, like) == [5, 5]
    assert trained.spent().epsilon == trained.plan.epsilon


@pytest.mark.parametrize(("sampling", "left"), [("poisson", [3, 5, 5]), ("cyclic", [3, 5, 5]), ("shuffled", [5, 5])])
def test_a_resumed_run_goes_on_in_its_epoch(sampling: str, left: list[int], tmp_path: Path) -> None:
    """Of shuffled batches, a pass that was begun is lost."""
    like = loader()
    planned = dp.Plan.like(like, epochs=3, sampling=sampling, **SETTINGS)
    trained = private(plan_=planned)
    trained.save(tmp_path / "run")
    for epoch in trained.epochs(like):
        for batch in epoch:
            trained.step(losses_of(trained._model, batch))
            if trained.steps == 2:
                break
        break
    resumed = private(plan_=planned)
    resumed.resume(tmp_path / "run")
    assert resumed.steps == 2
    assert epochs_of(resumed, like) == left
    assert resumed.spent().epsilon <= planned.budget


def test_an_epoch_that_is_left_early_does_not_make_others_longer() -> None:
    trained = private(plan_=plan(steps=15))
    found = []
    for epoch in trained.epochs(dataset()):
        before = trained.steps
        for batch in epoch:
            trained.step(losses_of(trained._model, batch))
            if trained.steps == 2:
                break
        found.append(trained.steps - before)
    assert found == [2, 5, 5]


@pytest.mark.parametrize(
    ("done", "steps", "per_epoch", "want"),
    [(0, 0, 5.0, []), (0, 7, 2.5, [3, 2, 2]), (4, 7, 2.5, [1, 2]), (3, 7, 2.5, [2, 2]), (0, 3, 1.0, [1, 1, 1])],
)
def test_lengths_of_epochs(done: int, steps: int, per_epoch: float, want: list[int]) -> None:
    assert list(lengths(done, steps, per_epoch)) == want


def collate(items: list[Any]) -> Any:
    return torch.stack([x for x, _ in items]) * 2, torch.stack([y for _, y in items])


def test_options_of_the_loader_are_used_and_may_be_replaced() -> None:
    data = dataset()
    like = loader(data=data, collate_fn=collate, num_workers=1, persistent_workers=True, prefetch_factor=3)
    trained = private(plan_=dp.Plan.like(like, epochs=1, **SETTINGS))
    for x, y in trained.batches(like, steps=1):
        assert all((x_ / 2 == data.tensors[0]).all(1).any() for x_ in x)
        trained.step(losses_of(trained._model, (x, y)))
    for x, y in trained.batches(like, steps=1, num_workers=0, collate_fn=None):
        assert all((x_ == data.tensors[0]).all(1).any() for x_ in x)
        trained.step(losses_of(trained._model, (x, y)))
    assert trained.steps == 2


def test_batches_of_a_loader_are_those_of_its_dataset() -> None:
    ends = []
    for data in (loader(shuffle=True), dataset()):
        model = network()
        trained = private(model, plan(batch_size=13))
        for batch in trained.batches(data):
            trained.step(losses_of(model, batch))
        ends.append(flat(model))
    assert torch.equal(*ends)


def test_epsilon_at_another_delta_is_the_accountants() -> None:
    trained = private(plan_=plan(steps=3))
    for batch in trained.batches(dataset()):
        trained.step(losses_of(trained._model, batch))
    for delta in (1e-3, 1e-5, 1e-9):
        ledger = RdpAccountant()
        event = dp_accounting.PoissonSampledDpEvent(12 / 60, dp_accounting.GaussianDpEvent(1.0))
        ledger.compose(dp_accounting.SelfComposedDpEvent(event, 3))
        assert trained.spent(delta) == dp.Spent(pytest.approx(ledger.get_epsilon(delta)), delta, 3)
    assert trained.spent() == trained.spent(delta=1e-5)
    for wrong in (0.0, 1.0, 1, "1e-5"):
        with pytest.raises(ValueError, match="delta must be a number between 0 and 1"):
            trained.spent(wrong)  # type: ignore[arg-type]


class OnDevice(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([x.to("cpu") for x in super().__iter__()])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(60))


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (dataset(), {}, TypeError, "like a DataLoader, not like a TensorDataset"),
    (OnDevice(dataset(), batch_size=4), {}, TypeError, "a OnDevice has an __iter__ of its own"),
    (DataLoader(dataset(), batch_size=None), {}, ValueError, "the loader makes no batches of a stated size"),
    (
        DataLoader(dataset(), batch_sampler=BatchSampler(SequentialSampler(dataset()), 4, False)),
        {},
        ValueError,
        "the loader makes no batches of a stated size",
    ),
    (
        loader(sampler=WeightedRandomSampler([1.0] * 60, 60)),
        {},
        ValueError,
        "samples by a WeightedRandomSampler, but batches are drawn as the plan",
    ),
    (loader(sampler=RandomSampler(dataset(), replacement=True)), {}, ValueError, "samples by a RandomSampler"),
    (loader(sampler=RandomSampler(dataset(), num_samples=7)), {}, ValueError, "samples by a RandomSampler"),
    (loader(sampler=SequentialSampler(range(30))), {}, ValueError, "samples by a SequentialSampler"),
    (loader(), {"examples": 60}, ValueError, "examples is the loader's: leave it out"),
    (loader(), {"batch_size": 13}, ValueError, "batch_size is the loader's: leave it out"),
    (loader(), {"users": 5}, ValueError, "users cannot be taken from a loader"),
    (loader(drop_last=True), {"sampling": "shuffled"}, ValueError, "an epoch has every example: use drop_last=False"),
    (loader(), {"steps": 3}, ValueError, "length is given twice: epochs=1 and steps=3"),
    (loader(), {"epochs": 0}, ValueError, "epochs must be positive and finite"),
    (loader(), {"epochs": "1"}, ValueError, "epochs must be a number"),
    (DataLoader(Stream(), batch_size=4), {}, TypeError, "a Stream has no length"),
]


@pytest.mark.parametrize(("like", "more", "error", "message"), REFUSED, ids=[r[3][:35] for r in REFUSED])
def test_plans_like_anything_else_are_refused(
    like: Any, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dp.Plan.like(like, **{"epochs": 1, **SETTINGS, **more})


def test_loaders_of_another_plan_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the plan is for batches of 12, but the loader's have 13.*dp.Plan.like"):
        private().batches(loader())
    with pytest.raises(ValueError, match=r"the plan is for batches of 12, but the loader's have 13"):
        private().epochs(loader())
    with pytest.raises(TypeError, match="a OnDevice has an __iter__ of its own"):
        private().batches(OnDevice(dataset(), batch_size=12))
    with pytest.raises(ValueError, match="the plan is for 60 examples, but the dataset has 59"):
        private().batches(DataLoader(dataset(59), batch_size=12))
    with pytest.raises(TypeError, match="needs a map-style dataset"):
        private().batches(DataLoader(Stream(), batch_size=12))
    with pytest.raises(ValueError, match="steps are those of an epoch"):
        private().epochs(dataset(), steps=3)
