"""Models in DistributedDataParallel: the local batch's answer, nothing communicated, the next steps as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import persample as ps
from tests.distributed.models import Unused, all_close, batch, clipped, close, losses, make, rows_of_all
from tests.distributed.processes import Processes
from tests.reference import definition, vectors

OPTIONS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
]
SIZE = 3


def wrap(options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """A plain model and its double in DDP."""
    return make(), DistributedDataParallel(make(), **options)


def own(rows: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """One rank's rows, under DDP's names."""
    return {f"module.{name}": r[rank * SIZE : (rank + 1) * SIZE] for name, r in rows.items()}


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def ordinary_step(rank: int, world: int, plain: nn.Module, wrapped: nn.Module, step: int) -> None:
    """DDP's own gradients are the mean over ranks, as if nothing had happened before."""
    wrapped.zero_grad()
    losses(wrapped, batch(rank, SIZE, step)).sum().backward()
    rows = rows_of_all(plain, [SIZE] * world, step)
    all_close(grads(wrapped), {f"module.{name}": r.sum(0) / world for name, r in rows.items()})
    wrapped.zero_grad()


def answers_alone(rank: int, world: int, options: dict[str, Any]) -> None:
    """One rank asks on its own: if anything were communicated, it would wait for the others."""
    plain, wrapped = wrap(options)
    rows = rows_of_all(plain, [SIZE] * world)
    for step in range(3):
        found = losses(wrapped, batch(rank, SIZE))
        if rank == 0:
            all_close(ps.grad(found, wrapped, retain_graph=True), own(rows, rank))
            close(ps.norms(found, wrapped, retain_graph=True, independent=True), vectors(own(rows, rank)).norm(dim=1))
            ps.backward(found, wrapped, ps.ClippedSum(0.5), retain_graph=True)
            all_close(grads(wrapped), clipped(own(rows, rank), 0.5))
            assert not grads(plain)
        wrapped.zero_grad()
        found.sum().backward()
        all_close(grads(wrapped), {f"module.{name}": r.sum(0) / world for name, r in rows.items()})
        ordinary_step(rank, world, plain, wrapped, step + 1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_are_of_the_local_batch(several: Processes, options: dict[str, Any]) -> None:
    several.run(answers_alone, options)


def only_per_sample(rank: int, world: int, options: dict[str, Any]) -> None:
    """Steps without any ordinary backward, and then one."""
    plain, wrapped = wrap(options)
    rows = rows_of_all(plain, [SIZE] * world)
    for _ in range(2):
        ps.backward(losses(wrapped, batch(rank, SIZE)), wrapped, ps.ClippedSum(0.5))
        all_close(grads(wrapped), clipped(own(rows, rank), 0.5))
        wrapped.zero_grad()
        total = ps.clipped_sum(losses(wrapped, batch(rank, SIZE)), wrapped, 0.5, process_group=dist.group.WORLD)
        all_close(total, {f"module.{name}": t for name, t in clipped(rows, 0.5).items()})
    ordinary_step(rank, world, plain, wrapped, 1)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], OPTIONS[3]], ids=str)
def test_steps_without_an_ordinary_backward(two: Processes, options: dict[str, Any]) -> None:
    two.run(only_per_sample, options)


def unused_parameter(rank: int, world: int) -> None:
    plain, wrapped = make(Unused), DistributedDataParallel(make(Unused), find_unused_parameters=True)
    ids = batch(rank, SIZE)
    found = wrapped(ids, extra=False).square().sum(1)
    want = definition(plain(ids, extra=False).square().sum(1), plain)
    all_close(ps.grad(found, wrapped, retain_graph=True), {f"module.{name}": r for name, r in want.items()})
    ps.backward(found, wrapped, ps.ClippedSum(1.0), retain_graph=True)
    assert wrapped.module.extra.weight.grad is None
    wrapped.zero_grad()
    found.sum().backward()
    wrapped(ids).square().sum().backward()
    assert wrapped.module.extra.weight.grad is not None


def test_a_parameter_that_the_losses_do_not_reach(two: Processes) -> None:
    two.run(unused_parameter)


def several_outputs(rank: int, world: int) -> None:
    """DDP's node at the outputs hands on one cotangent each, past those that need none."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": self.a(x), "size": len(x), "x": x, "b": self.b(x).t()}

    torch.manual_seed(0)
    model = Two().double()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    x = torch.randn(4, 2).double()

    def of(found: dict[str, Any]) -> Tensor:
        return found["a"].square().sum(1) + 2 * found["b"].pow(3).sum(0)

    got = ps.grad(of(wrapped(x)), wrapped, independent=True)
    all_close(got, {f"module.{name}": r for name, r in definition(of(model(x)), model).items()})


def test_outputs_of_all_kinds(two: Processes) -> None:
    two.run(several_outputs)
