"""Who is in a batch: never twice within the bands, whatever is drawn."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch

from persample import dp
from persample.dp.sampling import Sampler, cyclic, most_samples, poisson
from persample.dp.sources import Secure, Seeded, Source
from persample.dp.team import Team
from tests.dp.helpers import plan


def batches(drawing: dp.Plan, source: Source) -> list[list[int]]:
    """All batches of a run, as they are loaded."""
    sampler = Sampler(drawing, source, Team(), 0, drawing.length, None)
    found = []
    for samples in sampler:
        part = sampler.parts.popleft()
        found.append(samples[: part.size - part.padding])
    return found


@pytest.mark.parametrize("source", [Seeded(0), Secure()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("bands", [2, 3, 5])
def test_nobody_is_drawn_twice_within_the_bands(source: Source, bands: int) -> None:
    last: dict[int, int] = {}
    for step, batch in enumerate(batches(plan(mechanism="banded", bands=bands, steps=200), source)):
        for example in batch:
            assert step - last.get(example, -bands) >= bands
            last[example] = step
    assert len(last) == 60


@pytest.mark.parametrize("bands", [2, 5])
def test_examples_are_drawn_with_the_rate_in_their_turn_on_their_own(bands: int) -> None:
    """As `test_every_example_is_drawn_with_the_rate_on_its_own`, in every turn of a part."""
    turns = 2000
    drawing = plan(mechanism="banded", bands=bands, steps=turns * bands, batch_size=6)
    drawn = torch.zeros(turns, 60, dtype=torch.float64)
    for step in range(drawing.length):
        drawn[step // bands, poisson(drawing, Seeded(0), step)] = 1
    rate = bands * 6 / 60
    assert drawing.rate == pytest.approx(rate)
    z = (drawn - rate) / math.sqrt(rate * (1 - rate))
    assert float(z.mean(0).abs().max()) < 7 / math.sqrt(turns)
    assert float((z.t() @ z / turns).fill_diagonal_(0).abs().max()) < 7 / math.sqrt(turns)
    assert float((z[:-1] * z[1:]).mean(0).abs().max()) < 7 / math.sqrt(turns)


def test_a_whole_part_is_drawn_where_the_rate_is_one() -> None:
    drawing = plan(mechanism="banded", bands=5)
    assert [poisson(drawing, Seeded(0), step) for step in (0, 6)] == [list(range(0, 60, 5)), list(range(1, 60, 5))]


@pytest.mark.parametrize(("batch_size", "per_epoch"), [(12, 5), (25, 3), (60, 1), (59, 2), (1, 60)])
def test_cyclic_batches_are_the_same_in_every_epoch(batch_size: int, per_epoch: int) -> None:
    drawing = plan(sampling="cyclic", batch_size=batch_size, steps=3 * per_epoch)
    found = batches(drawing, Secure())
    assert sorted(chain(*found[:per_epoch])) == list(range(60))
    assert found[:per_epoch] == found[per_epoch : 2 * per_epoch] == found[2 * per_epoch :]
    assert {len(batch) for batch in found} <= {60 // per_epoch, -(-60 // per_epoch)}
    assert max(map(len, found)) <= batch_size == most_samples(drawing)
    assert found[per_epoch] == cyclic(drawing, per_epoch)


def test_one_band_draws_what_dp_sgd_draws() -> None:
    assert batches(plan(), Seeded(0)) == batches(plan(mechanism="banded", bands=1), Seeded(0))
