"""Empty batches: one sample is shown for each, the loop makes its turn, and nothing of the sample is counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample import dp
from persample.dp.sampling import poisson
from tests.dp.helpers import dataset, flat, losses_of, network, plan, private

LENGTH = 40


def sparse(model: nn.Module, **more: Any) -> dp.Private:
    """With a rate of 1 / 60 about a third of the batches is empty."""
    return private(model, plan(batch_size=1, steps=LENGTH, **more.pop("planned", {})), **more)


def sizes_of(trained: dp.Private) -> list[int]:
    return [len(poisson(trained.plan, trained._source, step)) for step in range(LENGTH)]


def test_every_step_has_a_batch_and_a_record() -> None:
    model = network()
    trained = sparse(model)
    records, shown = [], []
    for batch in trained.batches(dataset()):
        before = flat(model)
        records.append(trained.step(losses_of(model, batch)))
        shown.append(len(batch[0]))
        assert not torch.equal(before, flat(model))
    sizes = sizes_of(trained)
    assert 5 < sizes.count(0) < 25
    assert [r.size for r in records] == sizes
    assert shown == [{0: 1, 1: 2}.get(size, size) for size in sizes]  # and one that is alone is shown twice
    assert [r.number for r in records] == list(range(1, LENGTH + 1))
    assert all(r.updated for r in records)
    assert {(r.clipped, r.dropped) for r in records if not r.size} == {(0.0, 0)}


def test_loops_of_all_kinds_count_alike() -> None:
    """A schedule and clipping of the noisy gradient, by `step`, by `backward`, in parts and a step at a time."""

    def after(loop: Any) -> Tensor:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        trained = sparse(model, optimizer=optimizer)

        def turn(batch: Any) -> None:
            if trained.backward(losses_of(model, batch)).updated:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

        loop(trained, turn)
        assert schedule.last_epoch == trained.steps == LENGTH
        return flat(model)

    def plain(trained: dp.Private, turn: Any) -> None:
        for batch in trained.batches(dataset()):
            turn(batch)

    def in_parts(trained: dp.Private, turn: Any) -> None:
        for batch in trained.batches(dataset(), physical_batch_size=1):
            turn(batch)

    def one_by_one(trained: dp.Private, turn: Any) -> None:
        for _ in range(LENGTH):
            for batch in trained.batches(dataset(), steps=1):
                turn(batch)

    expected = after(plain)
    assert torch.equal(after(one_by_one), expected)
    torch.testing.assert_close(after(in_parts), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "clip",
    [ps.ClippedSum(0.3), ps.ClippedSum(0.3, nonfinite="drop"), dp.AdaptiveClip(initial=0.3)],
    ids=["raise", "drop", "adaptive"],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_what_is_shown_adds_exactly_nothing(clip: Any, value: float) -> None:
    """Whatever the example that is shown looks like, while no batch holds it: the same numbers, bit by bit."""

    def run(first: float | None) -> tuple[Tensor, dp.Private, list[dp.Step]]:
        data, model = dataset(), network()
        if first is not None:
            data.tensors[0][0] = first
        runs = (sparse(model, clip=clip, seed=seed) for seed in range(99))
        trained = next(
            run for run in runs if all(0 not in poisson(run.plan, run._source, step) for step in range(LENGTH))
        )
        return flat(model), trained, [trained.step(losses_of(model, batch)) for batch in trained.batches(data)]

    (_, ordinary, records), (_, strange, others) = run(None), run(value)
    assert torch.equal(flat(ordinary._model), flat(strange._model))
    assert records == others
    assert strange.dropped == 0
    assert ordinary.bound == strange.bound


def test_no_noise_no_samples_no_change() -> None:
    """Without noise, steps of empty batches leave everything where it is."""
    model = network()
    trained = sparse(model, planned={"noise_multiplier": 0.0})
    for batch in trained.batches(dataset()):
        before = flat(model)
        record = trained.step(losses_of(model, batch))
        assert torch.equal(before, flat(model)) == (record.size == 0)


def test_the_losses_of_what_is_shown_are_asked_for() -> None:
    model = network()
    trained = sparse(model)
    sizes = sizes_of(trained)
    for step, batch in enumerate(trained.batches(dataset())):
        if not sizes[step]:
            with pytest.raises(dp.PrivacyError, match="there are 2 losses, but the batch has 1 samples"):
                trained.step(losses_of(model, [torch.cat([t, t]) for t in batch]))
            break
        trained.step(losses_of(model, batch))


def test_adaptive_clips_do_not_count_what_is_shown() -> None:
    """Without noise the bound moves with the samples of a batch, and stays where there are none."""
    model = network()
    trained = sparse(model, planned={"noise_multiplier": 0.0}, clip=dp.AdaptiveClip(initial=1e6, rate=0.1))
    for batch in trained.batches(dataset()):
        bound = trained.bound
        size = trained.step(losses_of(model, batch)).size
        assert bound is not None
        expected = math.exp(-0.1 * size / 2)  # all are below the bound, and the expected size is 1
        assert trained.bound == pytest.approx(bound * expected)
