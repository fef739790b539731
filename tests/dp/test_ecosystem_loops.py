"""Learning-rate schedules and gradient accumulation in a loop of one's own: what counts is the logical batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from persample import dp
from persample.dp.sampling import poisson
from tests.dp.helpers import dataset, flat, losses_of, network, plan, private

Make = Callable[[torch.optim.Optimizer, int], Any]

SCHEDULES: dict[str, Make] = {
    "step": lambda optimizer, length: schedules.StepLR(optimizer, 3, gamma=0.5),
    "cosine": lambda optimizer, length: schedules.CosineAnnealingLR(optimizer, length),
    "warmup": lambda optimizer, length: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=4), schedules.ExponentialLR(optimizer, 0.9)],
        milestones=[4],
    ),
    "one cycle": lambda optimizer, length: schedules.OneCycleLR(optimizer, 1.0, total_steps=length),
}


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Filled with the learning rate of every step that the optimizer makes."""
    found: list[float] = []
    optimizer.register_step_pre_hook(lambda opt, *_: found.append(opt.param_groups[0]["lr"]))
    return found


def expected_rates(make: Make, length: int) -> list[float]:
    """What the schedule gives in an ordinary loop of so many steps."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    rates, schedule = rates_of(optimizer), make(optimizer, length)
    for _ in range(length):
        weight.grad = torch.zeros(1)
        optimizer.step()
        schedule.step()
    return rates


def run(length: int, batch_size: int) -> tuple[nn.Module, torch.optim.Optimizer, dp.Private]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, optimizer, private(model, plan(batch_size=batch_size, steps=length), optimizer=optimizer)


def empty_batches(trained: dp.Private) -> int:
    return sum(not poisson(trained.plan, trained._source, step) for step in range(trained.plan.length))


@pytest.mark.parametrize(("batch_size", "physical"), [(12, None), (12, 4), (12, 1), (1, None), (1, 1)])
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_schedules_step_at_logical_batches(make: Make, batch_size: int, physical: int | None) -> None:
    """Of batches of one sample on average, a third is empty."""
    model, optimizer, trained = run(30, batch_size)
    assert (empty_batches(trained) > 4) == (batch_size == 1)
    rates, schedule = rates_of(optimizer), make(optimizer, 30)
    for batch in trained.batches(dataset(), physical_batch_size=physical):
        if trained.step(losses_of(model, batch)).updated:
            schedule.step()
    assert rates == pytest.approx(expected_rates(make, 30))


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_one_step_at_a_time_empty_batches_count(make: Make) -> None:
    """A third of the batches is empty; the optimizer steps for them, and so does the schedule."""
    model, optimizer, trained = run(30, 1)
    assert 4 < empty_batches(trained) < 26
    rates, schedule = rates_of(optimizer), make(optimizer, 30)
    for _ in range(trained.plan.length):
        for batch in trained.batches(dataset(), steps=1, physical_batch_size=1):
            trained.step(losses_of(model, batch))
        schedule.step()
    assert rates == pytest.approx(expected_rates(make, 30))
    assert trained.spent().epsilon == trained.plan.epsilon


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_schedules_that_follow_the_optimizer(make: Make) -> None:
    """The same by one hook, in one loop."""
    model, optimizer, trained = run(30, 1)
    rates, schedule = rates_of(optimizer), make(optimizer, 30)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    for batch in trained.batches(dataset()):
        trained.step(losses_of(model, batch))
    assert rates == pytest.approx(expected_rates(make, 30))


def test_a_step_at_a_time_is_one_long_loop() -> None:
    long, short = run(30, 1), run(30, 1)
    for batch in long[2].batches(dataset()):
        long[2].step(losses_of(long[0], batch))
    for _ in range(30):
        for batch in short[2].batches(dataset(), steps=1):
            short[2].step(losses_of(short[0], batch))
    assert torch.equal(flat(long[0]), flat(short[0]))


def test_a_schedule_by_a_metric_of_public_data() -> None:
    """ReduceLROnPlateau once in an epoch, against the same metrics in an ordinary loop."""
    metrics = [1.0, 0.8, 0.8, 0.8, 0.8, 0.7, 0.7, 0.7, 0.7]
    model, optimizer, trained = run(18, 12)
    rates = rates_of(optimizer)
    schedule = schedules.ReduceLROnPlateau(optimizer, factor=0.1, patience=1)
    for metric in metrics:
        for batch in trained.batches(dataset(), steps=2, physical_batch_size=5):
            trained.step(losses_of(model, batch))
        schedule.step(metric)

    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    reference = schedules.ReduceLROnPlateau(other, factor=0.1, patience=1)
    expected = []
    for metric in metrics:
        expected += 2 * [other.param_groups[0]["lr"]]
        reference.step(metric)
    assert rates == pytest.approx(expected)
    assert len(set(rates)) > 2


@pytest.mark.parametrize("physical", [1, 5, 60])
def test_parts_add_up_to_the_batch(physical: int) -> None:
    """Adam and a schedule, in parts or not: the same parameters, and as many steps as the plan has."""
    found: list[Tensor] = []
    for parts in (None, physical):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        trained = private(model, plan(steps=8), optimizer=optimizer)
        schedule = schedules.CosineAnnealingLR(optimizer, 8)
        for batch in trained.batches(dataset(), physical_batch_size=parts):
            if trained.step(losses_of(model, batch)).updated:
                schedule.step()
        assert {int(state["step"]) for state in optimizer.state.values()} == {8}
        found.append(flat(model))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)


def test_gradients_of_accumulated_parts_are_those_of_the_definition() -> None:
    """Without noise, ``p.grad`` is the mean of clipped gradients over the expected size; until then it is not there."""
    model, bound = network(), 0.3
    trained = private(model, plan(steps=1, noise_multiplier=0))
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for batch in trained.batches(dataset(), physical_batch_size=4):
        assert all(p.grad is None for p in params)
        alone = len(batch[0]) == 2 and torch.equal(batch[0][0], batch[0][1])  # then it is shown twice
        for loss in losses_of(model, batch)[: 1 if alone else None]:
            rows = torch.autograd.grad(loss, params, retain_graph=True)
            weight = min(1.0, bound / float(torch.cat([g.flatten() for g in rows]).norm()))
            for t, g in zip(total, rows, strict=True):
                t += weight * g
        record = trained.backward(losses_of(model, batch))
    assert record.updated
    for p, t in zip(params, total, strict=True):
        torch.testing.assert_close(p.grad, t / trained.plan.batch_size, atol=1e-5, rtol=0)


def test_optimizers_stepped_by_the_loop() -> None:
    """`backward` and ``optimizer.step()`` are `step`, for empty batches, too."""
    by_step, by_loop = run(30, 1), run(30, 1)
    for batch in by_step[2].batches(dataset()):
        by_step[2].step(losses_of(by_step[0], batch))
    model, optimizer, trained = by_loop
    for _ in range(30):
        for batch in trained.batches(dataset(), steps=1):
            trained.backward(losses_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(flat(by_step[0]), flat(model))
