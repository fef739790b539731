"""Saved and resumed by several processes: every optimizer, refusals that reach all, errors that stop all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import persample as ps
from persample import dp
from persample.dp import sharded
from tests.distributed.processes import Processes
from tests.distributed.test_private import Digits, make_plan, mlp, private_for, same, train, weights_of, wrap

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "plain SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.05, "betas": (0.8, 0.9)}),
}


def private_with(model: nn.Module, kind: str, **changed: Any) -> dp.Private:
    """Two groups of parameters, each with a learning rate of its own; nothing is random."""
    make, options = OPTIMIZERS[kind]
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 0.2}, {"params": rest}]
    optimizer = make(groups, **{**options, **changed})  # type: ignore[call-arg]
    return dp.Private(model, optimizer, make_plan(0.0, batch_size=40), clip=ps.ClippedSum(0.5))


def goes_on(rank: int, world: int, kind: str, how: str, path: str) -> None:
    steady, model, later = (wrap(mlp(), how) for _ in range(3))
    train(steady, private_with(steady, kind), steps=6)
    private = private_with(model, kind)
    train(model, private, steps=3)
    private.save(path)
    again = private_with(later, kind, lr=7.0)
    again.resume(path)
    assert [group["lr"] for group in again._optimizer.param_groups] == [0.2, OPTIMIZERS[kind][1]["lr"]]
    train(later, again, steps=3)
    same(later, steady)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_every_optimizer_goes_on(two: Processes, kind: str, how: str, tmp_path: Path) -> None:
    two.run(goes_on, kind, how, str(tmp_path / "run"))


def refused(rank: int, world: int, path: str) -> None:
    """The first process reads the journal; all of them hear what is wrong with it."""
    private = private_for(mlp(), make_plan(1.0))
    private.save(path)
    if rank == 0:
        Path(path + ".journal").write_text("nonsense\n")
    dist.barrier()
    with pytest.raises(dp.PrivacyError, match="is not the journal of a private run"):
        private_for(mlp(), make_plan(1.0)).resume(path)
    with pytest.raises(dp.PrivacyError, match="is not the journal of a private run"):
        private_for(mlp(), make_plan(1.0), journal=path + ".journal")
    with pytest.raises(dp.PrivacyError, match="journal"):
        private_for(mlp(), make_plan(1.0)).save(path)


def test_what_the_first_process_refuses_is_refused_by_all(two: Processes, tmp_path: Path) -> None:
    two.run(refused, str(tmp_path / "run"))


def stopped(rank: int, world: int, how: str) -> None:
    """After an error in one process none of them goes on, and all do once they have resumed."""
    model = wrap(mlp(), how)
    private = private_for(model, make_plan(1.0, batch_size=40))
    train(model, private, steps=1)
    bad = float("nan") if rank == 1 else 1.0
    with pytest.raises((dp.PrivacyError, ps.NonFiniteError)):
        train(model, private, scale=bad)
    with pytest.raises(dp.PrivacyError, match="last step of this run failed"):
        train(model, private)
    private.load_state_dict(private.state_dict())
    assert private.steps in (1, 2)
    train(model, private, steps=2)
    for w in weights_of(model):
        first = w.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, w)


@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_an_error_in_one_process_stops_all(two: Processes, how: str) -> None:
    two.run(stopped, how)


def unwritten(rank: int, world: int, how: str, path: str) -> None:
    """The first process cannot write a step down: none makes it, not even of its own shard."""
    model = wrap(mlp(), how)
    private = private_for(model, make_plan(1.0, batch_size=40), journal=path)
    train(model, private, steps=1)
    before = weights_of(model)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises((OSError, dp.PrivacyError), match="space" if rank == 0 else "could not"):
            train(model, private)
    assert all(torch.equal(now, then) for now, then in zip(weights_of(model), before, strict=True))
    with pytest.raises(dp.PrivacyError, match="last step of this run failed"):
        train(model, private)
    private.load_state_dict(private.state_dict())
    assert private.steps == 2  # the line is there, though nobody knew
    train(model, private)
    dist.barrier()
    assert Path(path).read_text().count("step\n") == private.steps == 12


@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_a_step_that_cannot_be_written_down_is_made_by_none(two: Processes, how: str, tmp_path: Path) -> None:
    two.run(unwritten, how, str(tmp_path / "journal"))


def agree(rank: int, world: int) -> None:
    """Counts and bounds that came apart, as they can where one process fails after a release and others do not."""
    private = private_for(mlp(), make_plan(1.0), clip=dp.AdaptiveClip(initial=0.5))
    private._ledger.steps, private._clipper.bound = 1 + rank, 0.5 + rank
    private.load_state_dict(private.state_dict())
    assert (private.steps, private.bound) == (1, 0.5)


def test_all_go_by_the_accounts_of_the_first(two: Processes) -> None:
    two.run(agree)


def beside(rank: int, world: int, path: str) -> None:
    """A file is written where the run's own journal is, which counts more than the state that it went on from."""
    model = mlp()
    private = private_for(model, make_plan(1.0, batch_size=40))
    state = private.state_dict()
    private.save(path)
    train(model, private, steps=2)
    again = private_for(model, make_plan(1.0, batch_size=40))
    again.load_state_dict(state)
    again.save(path)
    assert again.steps == 2
    train(model, again)


def test_saving_beside_a_journal_that_knows_more(two: Processes, tmp_path: Path) -> None:
    two.run(beside, str(tmp_path / "run"))


def interrupted(rank: int, world: int) -> None:
    """No sum without noise is left anywhere, and none is added twice."""
    model = wrap(mlp(), "fsdp")
    private = private_for(model, make_plan(1.0, batch_size=40))
    x, y = next(private.batches(Digits()))
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "own_part", interrupt)
        with pytest.raises(KeyboardInterrupt):
            private.step(losses)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(dp.PrivacyError, match="last step of this run failed"):
        private.step(losses)


def test_an_interrupted_step_of_shards_leaves_no_sums(two: Processes) -> None:
    two.run(interrupted)
