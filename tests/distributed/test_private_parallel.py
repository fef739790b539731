"""Private training of tensor parallel models, alone and beside data parallelism: what one process alone would do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import persample as ps
from persample import dp
from tests.distributed.processes import Processes
from tests.distributed.test_correlated import planned
from tests.distributed.test_private import (
    CLASSES,
    CLIPS,
    EXAMPLES,
    FEATURES,
    make_plan,
    private_for,
    same,
    train,
    weights_of,
)

HOWS = ("dp x tp", pytest.param("tp", marks=pytest.mark.slow), pytest.param("fsdp x tp", marks=pytest.mark.slow))


def normed() -> nn.Sequential:
    """A layer that stays plain between two that are sharded; 3 classes do not divide by the number of processes."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        ).double()


def mesh_of(how: str) -> DeviceMesh:
    if how == "tp":
        return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def parallel(model: nn.Sequential, how: str) -> tuple[nn.Module, dp.Team]:
    """The model, and the team that trains it."""
    mesh = mesh_of(how)
    styles = {"1": ColwiseParallel(), "3": RowwiseParallel(), "5": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], styles)
    if how == "fsdp x tp":
        fully_shard(model, mesh=mesh["dp"])
    return model, dp.Shards(model, data=mesh["dp"]) if how == "dp x tp" else dp.Shards(model)


def as_one_alone(rank: int, world: int, how: str, options: dict[str, Any], clip: Any) -> None:
    alone = normed()
    model, team = parallel(normed(), how)
    lonely = private_for(alone, make_plan(0.0), dp.Team(), clip=clip)
    sizes = train(alone, lonely)
    private = private_for(model, make_plan(0.0), team, clip=clip)
    own = train(model, private, **options)
    same(model, alone)
    assert private.bound == pytest.approx(lonely.bound)
    total = torch.tensor(sum(own))
    dist.all_reduce(total)
    assert int(total) == sum(sizes) * (4 if how == "tp" else 2)  # each sample in all processes, or in two


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("clip", "options"),
    [
        ("flat", {}),
        pytest.param("flat", {"physical_batch_size": 1}, marks=pytest.mark.slow),
        pytest.param("automatic", {}, marks=pytest.mark.slow),
        pytest.param("adaptive", {}, marks=pytest.mark.slow),
        pytest.param("parameter", {}, marks=pytest.mark.slow),
    ],
)
def test_parts_do_what_one_process_does_without_noise(
    four: Processes, how: str, clip: str, options: dict[str, Any]
) -> None:
    found = ps.ClippedSum(0.5, per="parameter") if clip == "parameter" else CLIPS[clip]
    four.run(as_one_alone, how, options, found)


def pure_noise(rank: int, world: int, how: str) -> list[float]:
    """Steps without gradients: mean square of what they do to parameters, mean product of two parts', and counts."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.LayerNorm(100), nn.Linear(100, 40), nn.Tanh(), nn.Linear(40, 100), nn.Identity(), nn.Linear(100, 8)
    model, team = parallel(nn.Sequential(*layers), how)
    plan = dp.Plan(examples=100, batch_size=1, steps=2, noise_multiplier=2.0, delta=1e-9, accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = dp.Private(model, optimizer, plan, clip=ps.ClippedSum(0.5), seed=5, team=team)
    before = weights_of(model)
    for x in private.batches([torch.zeros(100)] * plan.examples):
        private.step(model(x).sum(1) * 0.0)
    changes = [(then - now) / math.sqrt(2) for then, now in zip(before, weights_of(model), strict=True)]
    line = torch.cat([w.flatten() for w in changes])
    first = line.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, line)  # the same parameters on every rank
    up, down = changes[2], changes[4].t()  # parts are rows of the one, and columns of the other
    between = torch.cat([(w[:10] * w[10 * n : 10 * n + 10]).flatten() for w in (up, down) for n in (1, 2, 3)])
    return [float(line.square().mean()), len(line), float(between.mean()), len(between)]


@pytest.mark.parametrize("how", HOWS)
def test_noise_is_added_once(four: Processes, how: str) -> None:
    """Variance (0.5 · 2)² on every coordinate, and independence of the parts; false alarms below 1e-8 (6 sigma)."""
    square, count, product, pairs = four.run(pure_noise, how)[0]
    assert abs(square - 1) < 6 * math.sqrt(2 / count) + 2e-3  # the scale is rounded up, by less than that
    assert abs(product) < 6 / math.sqrt(pairs)


def local_parts(rank: int, world: int, how: str) -> list[list[float]]:
    """Parameters 0 (plain) and 1 (sharded) after a few noisy steps, as this process holds them."""
    model, team = parallel(normed(), how)
    train(model, private_for(model, make_plan(1.0), team))
    own = [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
    return [own[0].tolist(), own[2].flatten().tolist()]


def test_processes_that_hold_the_same_part_have_the_same_numbers(four: Processes) -> None:
    plain, parts = zip(*four.run(local_parts, "dp x tp"), strict=True)
    assert plain[0] == plain[1] == plain[2] == plain[3]
    assert parts[0] == parts[2] != parts[1] == parts[3]


def one_fails(rank: int, world: int, how: str) -> None:
    model, team = parallel(normed(), how)
    private = private_for(model, make_plan(1.0, batch_size=20), team)
    before = weights_of(model)
    share = rank // 2 if how != "tp" else 0
    with pytest.raises(ps.NonFiniteError, match="are not finite"):
        train(model, private, scale=math.nan if share == 0 else 1.0)
    for now, then in zip(weights_of(model), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("how", ["dp x tp", pytest.param("tp", marks=pytest.mark.slow)])
def test_an_error_in_some_processes_is_an_error_in_all(four: Processes, how: str) -> None:
    four.run(one_fails, how)


def saved_and_resumed(rank: int, world: int, how: str, path: str) -> None:
    """By processes in the same places, and then by one alone."""
    plan, steady = make_plan(0.0, batch_size=EXAMPLES), normed()
    train(steady, private_for(steady, plan, dp.Team()))
    model, team = parallel(normed(), how)
    private = private_for(model, plan, team)
    train(model, private, steps=5)
    private.save(path)
    del private
    dist.barrier()
    later, team = parallel(normed(), how)
    again = private_for(later, plan, team)
    again.resume(path)
    train(later, again, steps=3)
    again.save(path)
    dist.barrier()
    del again
    if rank == 0:
        alone = private_for(normed(), plan, dp.Team())
        alone.resume(path)
        train(alone._model, alone)
        assert alone.steps == 12
        same(alone._model, steady)
    dist.barrier()


@pytest.mark.parametrize("how", HOWS)
def test_save_and_resume(four: Processes, how: str, tmp_path: Path) -> None:
    four.run(saved_and_resumed, how, str(tmp_path / "run"))


def correlated(rank: int, world: int, how: str, path: str) -> list[int]:
    """With the draws that the run would have made next; in earnest, a resumed run has new ones."""
    (steady, first), (model, second), (later, third) = (parallel(normed(), how) for _ in range(3))
    plan = planned("banded")
    train(steady, private_for(steady, plan, first))
    private = private_for(model, plan, second)
    train(model, private, steps=4)
    private.save(path)
    dist.barrier()
    again = private_for(later, plan, third)
    again.resume(path)
    again._source.nonce = private._source.nonce
    again._releases.upcoming = private._releases.upcoming
    train(later, again)
    same(later, steady)
    assert again._mechanism.stream is not None
    return [again._mechanism.stream.size]


@pytest.mark.parametrize("how", ["dp x tp", pytest.param("fsdp x tp", marks=pytest.mark.slow)])
def test_correlated_noise_is_gone_on_with(four: Processes, how: str, tmp_path: Path) -> None:
    """Every number has noise that one process remembers."""
    sizes = four.run(correlated, how, str(tmp_path / "run"))
    assert sum(size for (size,) in sizes) == sum(p.numel() for p in normed().parameters())


def refusals(rank: int, world: int) -> None:
    mesh = mesh_of("dp x tp")
    model = parallelize_module(normed(), mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    with pytest.raises(ValueError, match=r"tensor parallel over some of the processes.* data=mesh\['dp'\]"):
        private_for(model, make_plan(1.0))
    with pytest.raises(TypeError, match="data must be a DeviceMesh"):
        dp.Shards(model, data=mesh.get_group("dp"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hold different parts of \['1.weight', .* need the same samples"):
        dp.Shards(model, data=mesh["tp"])
    both = fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"FSDP shards the model over .*dp=2"):
        dp.Shards(both, data=mesh["tp"])
    with pytest.raises(ValueError, match="are sharded: use"):
        dp.Replicas(model)


def test_what_cannot_be_trained_together(four: Processes) -> None:
    four.run(refusals)
