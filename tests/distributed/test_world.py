"""Processes that come to know of each other after `dp.Private` was made, or never."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from persample import dp
from tests.distributed.processes import Processes, connect
from tests.distributed.test_private import Digits, losses_of, make_plan, mlp, private_for, train


def initialised_later(rank: int, world: int, store: str) -> None:
    dist.destroy_process_group()
    early, running, chosen = (private_for(mlp(), make_plan(1.0), team) for team in (None, None, dp.Team()))
    batch = next(iter(running.batches(Digits())))
    connect(rank, world, store)
    message = f"has {world} processes now, and had 1 when dp.Private was made: .* Make dp.Private after init_process"
    with pytest.raises(dp.PrivacyError, match=message):
        early.batches(Digits())
    with pytest.raises(dp.PrivacyError, match=message):
        running.step(losses_of(running._model, batch))
    assert running.steps == 0
    train(chosen._model, chosen, steps=3)
    assert chosen.steps == 3
    late = private_for(mlp(), make_plan(1.0))
    train(late._model, late, steps=3)
    assert late.steps == 3


def test_a_group_that_is_initialised_later(two: Processes, tmp_path: Path) -> None:
    two.run(initialised_later, str(tmp_path / "store"))


def test_processes_that_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun says how many there are."""
    private = private_for(mlp(), make_plan(1.0))
    monkeypatch.setenv("WORLD_SIZE", "4")
    private.batches(Digits())  # who starts processes says both
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(dp.PrivacyError, match=r"one of 4 processes \(WORLD_SIZE\), but torch.distributed is not init"):
        private.batches(Digits())
    private_for(mlp(), make_plan(1.0), dp.Team()).batches(Digits())
    monkeypatch.setenv("WORLD_SIZE", "1")
    private.batches(Digits())
