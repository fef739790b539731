"""Users, bounds of groups, schedules and AdamBC in several processes: what one process alone would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import persample as ps
from persample import dp
from tests.distributed.processes import Processes
from tests.distributed.test_private import EXAMPLES, Digits, losses_of, mlp, same, wrap

WHOSE = torch.arange(EXAMPLES) ** 2 % 11  # 6 users, of 3 to 8 items
CLIPS = {
    "flat": ps.ClippedSum(0.5),
    "adaptive groups": dp.AdaptiveClip(initial=0.5, per="parameter"),
    "scheduled": dp.ScheduledClip(ps.ClippedSum(0.5, per="parameter"), (1.0, 0.5)),
}


def users_run(model: nn.Module, noise: float, clip: Any, team: dp.Team | None = None) -> dp.Private:
    plan = dp.Plan(
        users=6,
        items_per_user=4,
        batch_size=2,
        steps=8,
        noise_multiplier=noise,
        noise_schedule=(1.0, 0.5),
        delta=1e-3,
        accountant="rdp",
    )
    optimizer = dp.AdamBC(model.parameters(), lr=0.05, floor=0.1)
    return dp.Private(model, optimizer, plan, clip, seed=3, team=team)


def train(model: nn.Module, private: dp.Private, **options: Any) -> int:
    """How many users this process has seen."""
    return sum(
        private.step(losses_of(model, batch)).size for batch in private.batches(Digits(), users=WHOSE, **options)
    )


def as_one_alone(rank: int, world: int, how: str, noise: float, clip: Any, physical: int | None) -> None:
    alone, model = mlp(), wrap(mlp(), how)
    lonely = users_run(alone, noise, clip, dp.Team())
    seen = train(alone, lonely)
    private = users_run(model, noise, clip)
    own = torch.tensor(train(model, private, physical_batch_size=physical))
    same(model, alone)
    assert private.spent() == lonely.spent()
    assert private.bound == pytest.approx(lonely.bound)
    dist.all_reduce(own)
    assert int(own) == seen


@pytest.mark.parametrize("name", CLIPS)
def test_replicas_share_users(several: Processes, name: str) -> None:
    several.run(as_one_alone, "plain", 1.0, CLIPS[name], 5)


@pytest.mark.parametrize("name", CLIPS)
def test_shards_share_users(several: Processes, name: str) -> None:
    several.run(as_one_alone, "fsdp", 0.0, CLIPS[name], None)


def resumed(rank: int, world: int, path: str) -> None:
    whole = wrap(mlp(), "fsdp")
    private = users_run(whole, 0.0, CLIPS["flat"])
    train(whole, private, steps=3)
    private.save(path)
    again = wrap(mlp(), "fsdp")
    other = users_run(again, 0.0, CLIPS["flat"])
    other.resume(path)
    for p, q in zip(whole.parameters(), again.parameters(), strict=True):
        ours, theirs = private._optimizer.state[p], other._optimizer.state[q]
        assert float(ours["step"]) == float(theirs["step"]) == 3
        torch.testing.assert_close(ours["exp_avg_sq"].full_tensor(), theirs["exp_avg_sq"].full_tensor())
        assert ours["noise_avg_sq"] == theirs["noise_avg_sq"]
    same(whole, again)
    train(again, other)
    assert other.steps == 8


def test_averages_of_shards_are_resumed(several: Processes, tmp_path: Any) -> None:
    several.run(resumed, str(tmp_path / "run"))
