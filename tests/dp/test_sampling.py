"""Batches: who is in them, how they are split and loaded, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from persample import dp
from persample.dp.sampling import poisson, shuffled
from persample.dp.sources import Secure, Seeded, Source
from tests.dp.helpers import dataset, flat, losses_of, network, plan, private


@pytest.mark.parametrize("source", [Seeded(0), Secure()], ids=lambda s: type(s).__name__)
def test_every_example_is_drawn_with_the_rate_on_its_own(source: Source) -> None:
    """2000 draws of 50 examples: frequencies and pairs within 7 standard deviations, P(false alarm) < 1e-7."""
    drawn = torch.zeros(2000, 50, dtype=torch.float64)
    drawing = plan(examples=50, batch_size=10)
    for step in range(2000):
        drawn[step, poisson(drawing, source, step)] = 1
    rate, n = 0.2, 2000
    deviation = (drawn.mean(0) - rate) / math.sqrt(rate * (1 - rate) / n)
    assert float(deviation.abs().max()) < 7
    z = (drawn - rate) / math.sqrt(rate * (1 - rate))
    assert float((z.t() @ z / n).fill_diagonal_(0).abs().max()) < 7 / math.sqrt(n)
    assert float(((z[:-1] * z[1:]).mean(0)).abs().max()) < 7 / math.sqrt(n)  # nor do steps know of each other
    sizes = drawn.sum(1)
    assert abs(float(sizes.var()) - 50 * rate * (1 - rate)) < 7 * 8 * math.sqrt(2 / n)


def test_everybody_is_in_a_full_batch() -> None:
    assert poisson(plan(batch_size=60), Seeded(0), 0) == list(range(60))


def test_a_shuffled_pass_shows_every_example_once() -> None:
    batches = list(shuffled(plan(batch_size=25, sampling="shuffled"), Seeded(0), 0))
    assert [len(b) for b in batches] == [25, 25, 10]
    assert sorted(chain(*batches)) == list(range(60))
    assert batches != list(shuffled(plan(batch_size=25, sampling="shuffled"), Seeded(0), 3))


class Recorded:
    """A dataset that remembers what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> Any:
        self.asked.append(i)
        return dataset()[i]


def run(trained: dp.Private, model: torch.nn.Module, **options: Any) -> list[int]:
    sizes = []
    for batch in trained.batches(options.pop("data", dataset()), **options):
        sizes.append(len(batch[0]))
        trained.step(losses_of(model, batch))
    return sizes


def test_batches_are_the_drawn_ones_until_the_plan_is_done() -> None:
    model, data = network(), Recorded()
    trained = private(model)
    sizes = run(trained, model, data=data)
    expected = [poisson(plan(), trained._source, step) for step in range(6)]
    assert data.asked == list(chain(*expected))
    assert sizes == [len(b) for b in expected]
    assert trained.steps == 6
    assert list(trained.batches(data)) == []


@pytest.mark.parametrize("physical", [1, 4, 100])
@pytest.mark.parametrize("workers", [0, 2])
def test_parts_and_workers_change_nothing_but_rounding(physical: int, workers: int) -> None:
    whole, parts = network(), network()
    run(private(whole), whole)
    trained = private(parts)
    sizes = run(trained, parts, physical_batch_size=physical, num_workers=workers)
    assert max(sizes) <= physical
    assert trained.steps == 6
    torch.testing.assert_close(flat(parts), flat(whole), atol=1e-5, rtol=0)


def test_only_the_last_part_updates() -> None:
    model = network()
    trained = private(model)
    records = []
    for batch in trained.batches(dataset(), physical_batch_size=5, steps=2):
        before = flat(model)
        record = trained.step(losses_of(model, batch))
        records.append(record)
        assert record.updated == (not torch.equal(before, flat(model)))
        assert record.size == len(batch[0]) - (record.size == 1)  # one that is alone is shown twice
    sizes = [len(poisson(plan(), trained._source, step)) for step in range(2)]
    assert [r.number for r in records] == [1] * math.ceil(sizes[0] / 5) + [2] * math.ceil(sizes[1] / 5)
    assert sum(r.updated for r in records) == 2
    assert sum(r.size for r in records) == sum(sizes)


def test_epochs_by_hand() -> None:
    """Several loops are one long loop."""
    once, often = network(), network()
    run(private(once), once)
    trained = private(often)
    for _ in range(3):
        run(trained, often, steps=2)
    assert torch.equal(flat(once), flat(often))


def test_leaving_the_loop_gives_the_same_batch_again() -> None:
    model = network()
    trained = private(model)
    seen = []
    for _ in range(2):
        for x, _ in trained.batches(dataset()):
            seen.append(x)
            break
    assert torch.equal(*seen)
    assert trained.steps == 0


def test_shuffled_passes_are_counted_when_they_begin() -> None:
    model = network()
    trained = private(model, plan(batch_size=20, steps=6, sampling="shuffled"))
    assert run(trained, model, steps=4) == [20, 20, 20, 20]
    assert trained.spent().epsilon == trained.plan.spent(6)  # two passes were begun
    assert run(trained, model) == []  # and the rest of the second is lost: it cannot be told from a third
    assert trained.steps == 4


def test_shuffled_noise_is_for_examples_replaced() -> None:
    """One example replaced moves the sum by twice the bound."""
    found = []
    for sampling in ("poisson", "shuffled"):
        trained = private(plan_=plan(batch_size=60, steps=1, sampling=sampling), clip=None)
        model = trained._model
        clean = private(plan_=plan(batch_size=60, steps=1, noise_multiplier=0, sampling=sampling))
        trained._source, clean._source = Seeded(0), Seeded(0)  # those of different plans are never the same
        for batch in trained.batches(dataset()):
            trained.backward(losses_of(trained._model, batch))
        for batch in clean.batches(dataset()):
            clean.backward(losses_of(clean._model, batch))
        noise = [p.grad - q.grad for p, q in zip(model.parameters(), clean._model.parameters(), strict=True)]
        found.append(torch.cat([t.flatten() for t in noise]))
    torch.testing.assert_close(found[1], 2 * found[0], atol=1e-4, rtol=1e-3)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(60))


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (dataset(59), {}, ValueError, "the plan is for 60 examples, but the dataset has 59"),
    (Stream(), {}, TypeError, "needs a map-style dataset.*a Stream has not both"),
    (iter(range(60)), {}, TypeError, "needs a map-style dataset"),
    (DataLoader(dataset()), {}, ValueError, "the plan is for batches of 12, but the loader's have 1"),
    (dataset(), {"batch_size": 3}, ValueError, "batch_size cannot be chosen"),
    (dataset(), {"shuffle": True}, ValueError, "shuffle cannot be chosen"),
    (dataset(), {"in_order": False}, ValueError, "in_order cannot be chosen"),
    (dataset(), {"physical_batch_size": 0}, ValueError, "physical_batch_size must be a positive integer, not 0"),
    (dataset(), {"steps": 1.5}, ValueError, "steps must be a positive integer, not 1.5"),
]


@pytest.mark.parametrize(("data", "options", "error", "message"), REFUSED, ids=[r[3][:25] for r in REFUSED])
def test_wrong_data_and_options_of_batches_are_refused(
    data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        private().batches(data, **options)


def test_an_own_collate_function_is_used() -> None:
    model = network()
    trained = private(model)

    def collate(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])

    run(trained, model, collate_fn=collate)
    assert trained.steps == 6
