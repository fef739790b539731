"""Loops of private training in several processes: the same turns everywhere, and what drifts apart is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from persample import dp
from persample.dp.sampling import poisson
from tests.distributed.processes import Processes
from tests.distributed.test_private import (
    CLIPS,
    Digits,
    losses_of,
    make_plan,
    mlp,
    private_for,
    same,
    train,
    weights_of,
    wrap,
)

STEPS = 30


def new(how: str, team: dp.Team | None = None, noise: float = 1.0, **more: Any) -> tuple[nn.Module, Any, dp.Private]:
    """Batches of two samples: most processes often have none."""
    model = wrap(mlp(), how)
    private = private_for(model, make_plan(noise, batch_size=2, steps=STEPS), team, **more)
    return model, private._optimizer, private


def with_schedule(model: nn.Module, optimizer: Any, private: dp.Private, **options: Any) -> list[dp.Step]:
    """The documented loop."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    records = []
    for batch in private.batches(Digits(), **options):
        records.append(private.step(losses_of(model, batch)))
        if records[-1].updated:
            schedule.step()
    return records


def with_clipping(model: nn.Module, optimizer: Any, private: dp.Private, **options: Any) -> list[dp.Step]:
    """The documented loop that steps by itself, with the noisy gradient clipped once more."""
    records = []
    for batch in private.batches(Digits(), **options):
        records.append(private.backward(losses_of(model, batch)))
        if records[-1].updated:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return records


def as_one_alone(rank: int, world: int, how: str, noise: float, loop: Any, options: dict[str, Any]) -> None:
    alone, optimizer, lonely = new("plain", dp.Team(), noise)
    whole = loop(alone, optimizer, lonely)
    model, optimizer, private = new(how, noise=noise)
    records = loop(model, optimizer, private, **options)
    same(model, alone)
    assert [r.number for r in records if r.updated] == list(range(1, STEPS + 1))
    numbers = torch.tensor([[r.number, r.updated, 0] for r in records])
    for one in range(3):  # all processes make the same turns
        first = numbers.clone()
        dist.broadcast(first, min(one, world - 1))
        assert torch.equal(first, numbers)
    sizes = torch.zeros(STEPS + 1, dtype=torch.int64)
    for r in records:
        sizes[r.number] += r.size
    dist.all_reduce(sizes)
    assert sizes[1:].tolist() == [r.size for r in whole]
    assert 0 in sizes[1:]


@pytest.mark.parametrize("loop", [with_schedule, with_clipping], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("how", "noise"), [("plain", 1.0), ("ddp", 1.0), ("fsdp", 0.0)])
def test_the_documented_loops_are_those_of_one_process(several: Processes, how: str, noise: float, loop: Any) -> None:
    several.run(as_one_alone, how, noise, loop, {})


@pytest.mark.parametrize(("how", "noise"), [("plain", 1.0), ("fsdp", 0.0)])
def test_loops_in_physical_batches_do_what_one_process_does(two: Processes, how: str, noise: float) -> None:
    two.run(as_one_alone, how, noise, with_schedule, {"physical_batch_size": 1})


def with_a_strange_example(rank: int, world: int, how: str, clip: Any, value: float) -> None:
    """What is shown where there is no sample cannot be seen in the result: the same numbers, bit by bit."""
    models, planned = [], make_plan(1.0, batch_size=2, steps=STEPS)

    def is_seen(seed: int) -> bool:
        source = new(how, noise=1.0, clip=clip, seed=seed)[2]._source
        return any(0 in poisson(planned, source, step) for step in range(10))

    seed = next(s for s in range(99) if not is_seen(s))
    for first in (None, value):
        model, _, private = new(how, noise=1.0, clip=clip, seed=seed)
        data = Digits()
        if first is not None:
            data.x[0] = first
        sizes = [private.step(losses_of(model, batch)).size for batch in private.batches(data, steps=10)]
        assert 0 in sizes or rank == 0
        assert private.dropped == 0
        models.append(model)
    same(*models, tolerance=0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("clip", ["flat", "adaptive"])
@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_what_is_shown_adds_exactly_nothing(two: Processes, how: str, clip: str, value: float) -> None:
    two.run(with_a_strange_example, how, CLIPS[clip], value)


def drifting(rank: int, world: int, how: str, what: str) -> None:
    """One process does something that the others do not: all of them say so in the next step."""
    model, optimizer, private = new(how)
    expected = {"lr": "lr of group 0", "betas": "betas of group 0", "weights": r"parameter '(module\.)?0\.bias'"}[what]
    train(model, private, steps=3)
    if rank == world - 1:
        if what == "weights":
            next(p for name, p in model.named_parameters() if name.endswith("0.bias")).data[0] += 1e-3
        elif what == "lr":
            optimizer.param_groups[0]["lr"] *= 0.5
        else:
            optimizer.param_groups[0]["betas"] = (0.5, 0.999)
    with pytest.raises(dp.PrivacyError, match=f"drifted apart, in {expected}: .* the same loop in all of them"):
        train(model, private)
    assert private.steps == 4  # the step under way counts as spent


@pytest.mark.parametrize(
    ("how", "what"), [("plain", "lr"), ("plain", "betas"), ("plain", "weights"), ("ddp", "weights"), ("fsdp", "lr")]
)
def test_what_drifts_apart_is_refused(several: Processes, how: str, what: str) -> None:
    several.run(drifting, how, what)


def another_backward(rank: int, world: int, how: str) -> None:
    model, optimizer, private = new(how)
    train(model, private, steps=2)
    batch = next(iter(private.batches(Digits())))
    private.backward(losses_of(model, batch))
    losses_of(model, batch).mean().backward()
    before = weights_of(model)
    with pytest.raises(dp.PrivacyError, match="that a backward has added to"):
        optimizer.step()
    for now, then in zip(weights_of(model), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("how", ["plain", "ddp", "fsdp"])
def test_gradients_of_another_backward(two: Processes, how: str) -> None:
    two.run(another_backward, how)
