"""Private training by several processes: what one process alone would do, and errors that reach all of them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import persample as ps
from persample import dp
from persample.dp import early, noise
from tests import models
from tests.distributed.processes import Processes

EXAMPLES, FEATURES, CLASSES = 40, 5, 3


class Digits(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random data that every process has."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(EXAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        self.y = torch.randint(CLASSES, (EXAMPLES,), generator=generator)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def mlp() -> nn.Sequential:
    return models.mlp(FEATURES, 7, CLASSES)


def sharded(model: nn.Sequential, reshard: bool | None = None, **options: Any) -> nn.Module:
    for layer in (model[0], model[2], model):
        fully_shard(layer, reshard_after_forward=reshard, **options)
    return model


def make_plan(noise: float, batch_size: int = 3, steps: int = 12) -> dp.Plan:
    """Batches so small that some processes, and sometimes all, have no sample."""
    return dp.Plan(
        examples=EXAMPLES, batch_size=batch_size, steps=steps, noise_multiplier=noise, delta=1e-3, accountant="rdp"
    )


def private_for(model: nn.Module, plan: dp.Plan, team: dp.Team | None = None, **options: Any) -> dp.Private:
    options = {"clip": ps.ClippedSum(0.5), "seed": 3, **options}
    return dp.Private(model, torch.optim.Adam(model.parameters(), lr=0.05), plan, team=team, **options)


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(model: nn.Module, private: dp.Private, scale: float = 1.0, **options: Any) -> list[int]:
    """The sizes of the batches that this process saw."""
    sizes = []
    for batch in private.batches(Digits(), **options):
        sizes.append(private.step(losses_of(model, batch) * scale).size)
    return sizes


def weights_of(model: nn.Module) -> list[Tensor]:
    """Full parameters, wherever they are."""
    found = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for p in found]


def same(model: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    """Adam makes much of the last digit of a gradient that is nearly zero."""
    for got, want in zip(weights_of(model), weights_of(other), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def wrap(model: nn.Sequential, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "hsdp":
        return sharded(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return sharded(model) if how == "fsdp" else model


def as_one_alone(rank: int, world: int, how: str, noise: float, options: dict[str, Any], clip: Any) -> None:
    alone, model = mlp(), wrap(mlp(), how)
    lonely = private_for(alone, make_plan(noise), dp.Team(), clip=clip)
    sizes = train(alone, lonely)
    private = private_for(model, make_plan(noise), clip=clip)
    own = train(model, private, **options)
    same(model, alone)
    assert private.spent() == lonely.spent()
    total = torch.tensor(sum(own))
    dist.all_reduce(total)
    assert int(total) == sum(sizes)
    assert min(sizes) < world  # some batches had no sample for some of the processes


CLIPS = {
    "flat": ps.ClippedSum(0.5),
    "automatic": ps.ClippedSum(0.5, gamma=0.1),
    "adaptive": dp.AdaptiveClip(initial=0.5),
}


@pytest.mark.parametrize("how", ["plain", "ddp"])
def test_replicas_do_what_one_process_does_with_the_same_noise(several: Processes, how: str) -> None:
    several.run(as_one_alone, how, 1.0, {}, CLIPS["flat"])


def as_one_alone_in_shares(rank: int, world: int, clip: Any) -> None:
    """Blocks so small that every process has some, which begin and end within parameters."""
    with patch.object(noise, "BLOCK", 16), patch.object(early, "BLOCK", 16):
        as_one_alone(rank, world, "plain", 1.0, {}, clip)


@pytest.mark.parametrize("clip", ["flat", "adaptive"])
def test_every_replica_makes_a_share_of_the_noise(several: Processes, clip: str) -> None:
    several.run(as_one_alone_in_shares, CLIPS[clip])


@pytest.mark.parametrize("how", ["plain", "fsdp"])
@pytest.mark.parametrize("clip", CLIPS)
def test_replicas_do_what_one_process_does_without_noise(several: Processes, how: str, clip: str) -> None:
    several.run(as_one_alone, how, 0.0, {}, CLIPS[clip])


@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_replicas_do_what_one_process_does_in_physical_batches(two: Processes, how: str) -> None:
    two.run(as_one_alone, how, 0.0, {"physical_batch_size": 1}, CLIPS["flat"])


def test_groups_of_parameters(two: Processes) -> None:
    two.run(as_one_alone, "plain", 0.0, {}, ps.ClippedSum(0.5, per="parameter"))


def pure_noise(rank: int, world: int, how: str, secure: bool) -> list[float]:
    """Steps without gradients: mean square of what they do to parameters, mean product of two shards', and counts."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(100, 50), nn.Identity(), nn.Linear(50, 100)), how)
    plan = dp.Plan(examples=100, batch_size=1, steps=2, noise_multiplier=2.0, delta=1e-9, accountant="rdp")
    optimizer, source = torch.optim.SGD(model.parameters(), lr=1.0), {"secure": True} if secure else {"seed": 5}
    private = dp.Private(model, optimizer, plan, clip=ps.ClippedSum(0.5), **source)
    before = weights_of(model)
    for x in private.batches([torch.zeros(100)] * plan.examples):
        private.step(model(x).sum(1) * 0.0)
    changes = [(then - now) / math.sqrt(2) for then, now in zip(before, weights_of(model), strict=True)]
    parts = 2 if how == "hsdp" else world
    rows = [(w, -(-len(w) // parts)) for w in changes if w.ndim > 1]  # of the first shard, and as many of the second
    products = [w[:n] * w[n : 2 * n] for w, n in rows]
    line, between = torch.cat([w.flatten() for w in changes]), torch.cat([t.flatten() for t in products])
    first = line.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, line)  # the same parameters on every rank
    return [float(line.square().mean()), len(line), float(between.mean()), len(between)]


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_noise_is_added_once(several: Processes, how: str, secure: bool) -> None:
    """Variance (0.5 · 2)² on every coordinate, and independence of the shards; false alarms below 1e-8 (6 sigma)."""
    square, count, product, pairs = several.run(pure_noise, how, secure)[0]
    assert abs(square - 1) < 6 * math.sqrt(2 / count) + 2e-3  # the scale is rounded up, by less than that
    assert abs(product) < 6 / math.sqrt(pairs)


def starts_apart(rank: int, world: int) -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight += rank
    with pytest.raises(ValueError, match="start with different parameters"):
        private_for(model, make_plan(1.0))
    buffers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    with pytest.raises(ValueError, match="wrap with broadcast_buffers=False"):
        private_for(DistributedDataParallel(buffers), make_plan(1.0))
    with pytest.raises(ValueError, match=r"are sharded: use dp\.Shards"):
        dp.Replicas(sharded(mlp()))
    with pytest.raises(ValueError, match="are not sharded"):
        dp.Shards(mlp())


def test_what_cannot_be_trained_together(two: Processes) -> None:
    two.run(starts_apart)


def one_fails(rank: int, world: int, how: str) -> None:
    """A sample that is not finite on one rank: its error there, an error on all, and nothing released."""
    model = wrap(mlp(), how)
    private = private_for(model, make_plan(1.0, batch_size=20))
    before = weights_of(model)
    expected = ps.NonFiniteError if how != "plain" or rank == 1 else dp.PrivacyError
    match = "are not finite" if expected is ps.NonFiniteError else f"1 of {world} processes could not make this step"
    with pytest.raises(expected, match=match):
        train(model, private, scale=math.nan if rank == 1 else 1.0)
    for now, then in zip(weights_of(model), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_an_error_in_one_process_is_an_error_in_all(several: Processes, how: str) -> None:
    several.run(one_fails, how)


def saved_and_resumed(rank: int, world: int, how: str, path: str) -> None:
    """Parameters, optimizer and accounts go on from a file, in other processes' models, without noise to compare by."""
    steady, model, later = mlp(), wrap(mlp(), how), wrap(mlp(), how)
    train(steady, private_for(steady, make_plan(0.0, batch_size=EXAMPLES), dp.Team()), steps=10)
    private = private_for(model, make_plan(0.0, batch_size=EXAMPLES))
    train(model, private, steps=5)
    private.save(path)
    train(model, private, steps=2)
    again = private_for(later, make_plan(0.0, batch_size=EXAMPLES))
    again.resume(path)
    assert again.steps == 7  # the two steps after the file was written are in the journal
    train(later, again)
    assert again.steps == 12
    same(later, steady)  # five steps before the file was written, five after it was read
    dist.barrier()
    lines = Path(path + ".journal").read_text().count("step\n")
    assert lines == 7


@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_save_and_resume(several: Processes, how: str, tmp_path: Path) -> None:
    several.run(saved_and_resumed, how, str(tmp_path / "run.safetensors"))


def until_one_dies(rank: int, world: int, how: str, path: str) -> None:
    """The last process ends without a word in its sixth step."""
    model = wrap(mlp(), how)
    private = private_for(model, make_plan(1.0, batch_size=EXAMPLES))
    for batch in private.batches(Digits()):
        if rank == world - 1 and private.steps == 5:
            os._exit(1)
        private.step(losses_of(model, batch))
        if private.steps % 2 == 0:
            private.save(path)


def go_on(rank: int, world: int, how: str, path: str) -> int:
    """New processes go on, count what the journal has, and end with the same parameters."""
    model = wrap(mlp(), how)
    private = private_for(model, make_plan(1.0, batch_size=EXAMPLES))
    private.resume(path)
    found = private.steps
    train(model, private)
    assert private.steps == 12
    mine = weights_of(model)
    for w in mine:
        first = w.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, w)
    return found


@pytest.mark.parametrize("how", ["plain", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_process_that_dies_ends_the_run_and_it_can_be_resumed(several: Processes, how: str, tmp_path: Path) -> None:
    path = str(tmp_path / "run.safetensors")
    with pytest.raises(AssertionError) as failure:
        several.run(until_one_dies, how, path)
    first, *_, last = str(failure.value).split("rank ")[1:]
    assert "the process has ended" in last
    assert "processes is gone, or does not come to the same step" in first if how == "plain" else "Error" in first
    assert set(several.run(go_on, how, path)) <= {5, 6}  # the step under way counts if it was accounted for


def one_is_late(rank: int, world: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=10))
    model = mlp()
    private = private_for(model, make_plan(1.0, batch_size=EXAMPLES), dp.Replicas(model, group))
    if rank == 0:
        with pytest.raises(dp.PrivacyError, match="gone, or does not come to the same step in time"):
            train(model, private)
    dist.barrier()  # by which the other one comes, too late


@pytest.mark.slow
def test_a_process_that_does_not_come_in_time(two: Processes) -> None:
    two.run(one_is_late)
    two.stop()


def test_a_team_needs_processes() -> None:
    with pytest.raises(ValueError, match=r"needs torch\.distributed\.init_process_group first"):
        dp.Replicas(mlp())


@pytest.mark.slow
def test_the_same_script_under_torchrun() -> None:
    """Nothing in the script but `init_process_group` says that there are several processes."""
    script = str(Path(__file__).with_name("script.py"))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600, "check": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    several = subprocess.run(start, env=environment, **options).stdout.split()
    alone = subprocess.run([sys.executable, script], env=environment, **options).stdout.split()
    assert len(several) == 2
    assert set(several) == set(alone)
