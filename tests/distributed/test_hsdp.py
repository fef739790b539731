"""FSDP2 over a mesh of two dims, replicas of shards (HSDP): as with one dim, and noise that all replicas share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import persample as ps
from persample import dp
from tests.distributed import test_correlated, test_fsdp, test_private, test_private_users, test_resume
from tests.distributed.models import Net
from tests.distributed.processes import Processes
from tests.distributed.test_private import (
    CLIPS,
    EXAMPLES,
    make_plan,
    mlp,
    private_for,
    same,
    train,
    wrap,
)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def every_verb(rank: int, world: int) -> None:
    test_fsdp.every_verb(rank, world, "blocks", None, mesh=mesh())


def trained(rank: int, world: int) -> None:
    test_fsdp.train(rank, world, Net, "whole", None, mesh=mesh())


def test_every_verb_gives_full_gradients_of_the_local_batch(four: Processes) -> None:
    four.run(every_verb)


@pytest.mark.slow
def test_training_does_what_a_plain_model_does(four: Processes) -> None:
    four.run(trained)


@pytest.mark.parametrize(
    ("clip", "options"),
    [
        ("flat", {}),
        pytest.param("flat", {"physical_batch_size": 1}, marks=pytest.mark.slow),
        pytest.param("automatic", {}, marks=pytest.mark.slow),
        ("adaptive", {}),
        pytest.param("parameter", {}, marks=pytest.mark.slow),
    ],
)
def test_shards_do_what_one_process_does_without_noise(four: Processes, clip: str, options: dict[str, Any]) -> None:
    found = ps.ClippedSum(0.5, per="parameter") if clip == "parameter" else CLIPS[clip]
    four.run(test_private.as_one_alone, "hsdp", 0.0, options, found)


@pytest.mark.slow
def test_users(four: Processes) -> None:
    four.run(test_private_users.as_one_alone, "hsdp", 0.0, test_private_users.CLIPS["scheduled"], 5)


@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_noise_is_added_once(four: Processes, secure: bool) -> None:
    test_private.test_noise_is_added_once(four, "hsdp", secure)


def replicas_are_alike(rank: int, world: int, kind: str | None) -> list[list[float]]:
    """Local parts after a few steps."""
    model = wrap(mlp(), "hsdp")
    plan = make_plan(1.0) if kind is None else test_correlated.planned(kind)
    train(model, private_for(model, plan))
    return [p.detach().to_local().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("kind", [None, pytest.param("banded", marks=pytest.mark.slow)])
def test_replicas_of_a_shard_have_the_same_numbers(four: Processes, kind: str | None) -> None:
    parts = four.run(replicas_are_alike, kind)
    assert parts[0] == parts[2] != parts[1] == parts[3]


def made_by_the_first_alone(rank: int, world: int) -> None:
    """Were all replicas to make noise, that of machines of other kinds would differ in the last digit."""
    model = wrap(mlp(), "hsdp")
    private = private_for(model, make_plan(1.0))
    source = private._source
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        normals = type(source).normals
        patch.setattr(type(source), "normals", lambda *given: (drawn.append(given[2]), normals(*given))[1])
        train(model, private)
    assert bool(drawn) == (rank in (0, 1))


def test_noise_is_made_by_the_first_of_the_replicas_alone(four: Processes) -> None:
    four.run(made_by_the_first_alone)


def test_an_error_in_one_process_is_an_error_in_all(four: Processes) -> None:
    four.run(test_private.one_fails, "hsdp")


def drifts(rank: int, world: int) -> None:
    """One replica of a shard is changed: all processes hear of it, and of which parameter."""
    model = wrap(mlp(), "hsdp")
    private = private_for(model, make_plan(1.0))
    train(model, private, steps=1)
    if rank == 3:
        with torch.no_grad():
            model[2].weight.to_local().add_(1.0)
    with pytest.raises(dp.PrivacyError, match=r"drifted apart, in parameter '0.weight', .*'2.weight'"):
        train(model, private)


def test_replicas_that_drift_apart_are_refused(four: Processes) -> None:
    four.run(drifts)


@pytest.mark.slow
def test_save_and_resume(four: Processes, tmp_path: Path) -> None:
    four.run(test_private.saved_and_resumed, "hsdp", str(tmp_path / "run.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", test_resume.OPTIMIZERS)
def test_every_optimizer_goes_on(four: Processes, kind: str, tmp_path: Path) -> None:
    four.run(test_resume.goes_on, kind, "hsdp", str(tmp_path / "run"))


def in_another_way(rank: int, world: int, path: str) -> None:
    """A run over a mesh of two dims is gone on with over one dim, and by one process alone."""
    steady, model = mlp(), wrap(mlp(), "hsdp")
    plan = make_plan(0.0, batch_size=EXAMPLES)
    train(steady, private_for(steady, plan, dp.Team()))
    private = private_for(model, plan)
    train(model, private, steps=5)
    private.save(path)
    del private
    dist.barrier()
    later = wrap(mlp(), "fsdp")
    again = private_for(later, plan)
    again.resume(path)
    train(later, again, steps=3)
    again.save(path)
    dist.barrier()
    del again
    if rank == 0:
        alone = private_for(mlp(), plan, dp.Team())
        alone.resume(path)
        train(alone._model, alone)
        assert alone.steps == 12
        same(alone._model, steady)
    dist.barrier()


def test_other_numbers_of_processes_go_on(four: Processes, tmp_path: Path) -> None:
    four.run(in_another_way, str(tmp_path / "run"))


def test_correlated_noise_is_gone_on_with(four: Processes, tmp_path: Path) -> None:
    """It is remembered where it is made: once for each shard."""
    four.run(test_correlated.goes_on, "banded", "hsdp", str(tmp_path / "run"))
    assert sorted(path.name for path in tmp_path.glob("run.noise*")) == ["run.noise", "run.noise-1"]
