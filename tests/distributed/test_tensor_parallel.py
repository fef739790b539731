"""Tensor parallel models (DTensors in the graph): what one process alone would answer, in every process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import persample as ps
from tests.distributed.models import WIDTH, Net, all_close, batch, clipped, close, losses, make, rows_of_all
from tests.distributed.processes import Processes
from tests.reference import definition, vectors

HIDDEN = 8
HOWS = ("plain", "dtensors", "sequence")


class Wide(Net):
    """With blocks that four processes can share; 7 words and 5 classes do not divide by their number."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)


def styles(how: str) -> dict[str, ParallelStyle]:
    """Parallel styles by module: outputs as plain tensors, as DTensors, or sharded along the sequence."""
    if how == "plain":
        ends = {
            "words": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        block = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    elif how == "dtensors":
        ends = {
            "words": ColwiseParallel(output_layouts=Replicate()),
            "head": RowwiseParallel(input_layouts=Replicate()),
        }
        block = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    else:
        ends = {
            "words": ColwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "blocks.0.norm": SequenceParallel(),
            "blocks.1.norm": SequenceParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        block = {
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
    inner = {f"blocks.{i}.{name}": style for i in range(2) for name, style in block.items()}
    return {**ends, **inner}


def tensor_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def parallel(how: str, mesh: DeviceMesh | None = None) -> nn.Module:
    return parallelize_module(make(Wide), mesh or tensor_mesh(), styles(how))


def every_verb(rank: int, world: int, how: str, size: int) -> None:
    plain, model, ids = make(Wide), parallel(how), batch(0, size)
    rows = definition(losses(plain, ids), plain)
    found = losses(model, ids)
    all_close(ps.grad(found, model, retain_graph=True), rows)
    close(ps.norms(found, model, retain_graph=True, independent=True), vectors(rows).norm(dim=1))
    per = ps.norms(found, model, per=[model.blocks, [model.words], ["head.weight", "head.bias"]], retain_graph=True)
    close(per[0], vectors({n: r for n, r in rows.items() if n.startswith("blocks")}).norm(dim=1))
    close(ps.gram(found, model, retain_graph=True), vectors(rows) @ vectors(rows).t())
    close(
        ps.dot(found, model, dict(model.named_parameters()), retain_graph=True),
        vectors(rows) @ torch.cat([p.detach().flatten() for p in plain.parameters()]),
    )
    all_close(
        ps.second_moment(found, model, retain_graph=True),
        {name: r.square().mean(0) for name, r in rows.items()},
    )
    all_close(ps.clipped_sum(found, model, 0.5, retain_graph=True), clipped(rows, 0.5))
    ps.backward(found, model, ps.ClippedSum(0.5))
    all_close({name: whole_of(p.grad) for name, p in model.named_parameters()}, clipped(rows, 0.5))


def whole_of(t: Any) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


@pytest.mark.parametrize(
    ("how", "size"),
    [
        ("plain", 6),
        *[pytest.param(how, n, marks=pytest.mark.slow) for how in HOWS for n in (6, 1) if (how, n) != ("plain", 6)],
    ],
)
def test_every_verb_gives_what_one_process_gives(four: Processes, how: str, size: int) -> None:
    four.run(every_verb, how, size)


class Rows(nn.Module):
    """Rows of numbers, which PyTorch shards for an empty batch, too; a weight that is computed from others."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight * torch.tanh(self.gate.weight)
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            x = DTensor.from_local(x, mesh, [Replicate()])
            return self.down(torch.tanh(nn.functional.linear(x, weight, self.up.bias)))
        return self.down(torch.tanh(nn.functional.linear(x, weight, self.up.bias)))


def computed(rank: int, world: int, size: int) -> None:
    """Nodes that are called by hand get DTensors, as they have saved some."""
    plain, model = make(Rows), make(Rows)
    parallelize_module(
        model, tensor_mesh(), {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(size, WIDTH, dtype=torch.float64)
    rows = definition(plain(x).square().sum(1), plain)
    all_close(ps.grad(model(x).square().sum(1), model), rows)
    all_close(ps.clipped_sum(model(x).square().sum(1), model, 0.5), clipped(rows, 0.5))
    ps.backward(model(x).square().sum(1), model, ps.ClippedSum(0.5))
    close(model.gate.weight.grad.full_tensor(), clipped(rows, 0.5)["gate.weight"])
    assert model.gate.bias.grad is None


@pytest.mark.filterwarnings("ignore::persample.PerformanceWarning")
@pytest.mark.parametrize("size", [5, *[pytest.param(n, marks=pytest.mark.slow) for n in (1, 0)]])
def test_weights_that_are_computed(four: Processes, size: int) -> None:
    four.run(computed, size)


class Scaled(nn.Module):
    """A plain parameter between layers: on parts of the activations, or on whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.rand(HIDDEN // 4))
        self.last = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, scale: bool = True) -> Tensor:
        x = self.up(x)
        return self.last * self.down(x * self.scale if scale else x)


def refusals(rank: int, world: int) -> None:
    mesh = tensor_mesh()
    model = parallelize_module(make(Scaled), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.ones(3, WIDTH, dtype=torch.float64)
    with pytest.raises(
        ps.UnsupportedError, match=r"parameters \['scale'\] are no DTensors.* a part of their gradients"
    ):
        ps.norms(model(x).sum(1), model)
    others = {name: p for name, p in model.named_parameters() if name != "scale"}
    ps.norms(model(x, scale=False).sum(1), others)  # on whole activations
    with pytest.raises(ps.UnsupportedError, match="have different losses"):
        ps.norms((model(x, scale=False) * (x + rank)).sum(1), others)
    with pytest.raises(ps.UnsupportedError, match="have different losses"):
        ps.norms(model(x, scale=False).sum(1)[: 2 + rank // 3], others)
    with pytest.raises(ValueError, match=r"\['up.weight', .* every sample would be counted several times"):
        ps.clipped_sum(model(x, scale=False).sum(1), others, 1.0, process_group=dist.group.WORLD)
    with pytest.raises(ps.UnsupportedError, match=r"\['up.weight', .* are sharded, .* create_graph"):
        ps.norms(model(x, scale=False).sum(1), others, create_graph=True)
    with pytest.raises(TypeError, match="losses are a DTensor"):
        ps.norms(DTensor.from_local(model(x, scale=False).sum(1), mesh, [Replicate()]), others)
    weight = model.up.weight
    with pytest.raises(ps.UnsupportedError, match="weights become parts of a whole"):
        ps.norms((x @ weight.to_local().t()).sum(1) * 0, [weight])
    halves = DTensor.from_local(x @ weight.full_tensor().t(), mesh, [Shard(0)])  # 3 samples of 12
    with pytest.raises(ps.UnsupportedError, match="samples are parted by a DTensor's placement"):
        ps.norms(halves.sum(1).to_local(), [weight])
    with pytest.raises(RuntimeError, match=r"module is sharded, .* use ps\.grad"):
        ps.call_for_per_sample_grads(model)


def test_what_would_be_another_answer_than_one_process_gives_is_refused(four: Processes) -> None:
    four.run(refusals)


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def beside_data_parallelism(rank: int, world: int) -> None:
    """Each pair of processes has samples of its own; sums are over the pairs."""
    mesh = two_by_two()
    share = mesh.get_local_rank("dp")
    plain, model = make(Wide), parallel("plain", mesh["tp"])
    rows = rows_of_all(plain, SIZES)
    found = losses(model, batch(share, SIZES[share]))
    own = {name: r[: SIZES[0]] if share == 0 else r[SIZES[0] :] for name, r in rows.items()}
    all_close(ps.grad(found, model, retain_graph=True), own)
    ps.backward(found, model, ps.ClippedSum(0.5), process_group=mesh.get_group("dp"))
    all_close({name: whole_of(p.grad) for name, p in model.named_parameters()}, clipped(rows, 0.5))


SIZES = (3, 5)


def test_tensor_parallel_beside_data_parallel(four: Processes) -> None:
    four.run(beside_data_parallelism)


def sharded_and_parallel(rank: int, world: int, how: str) -> None:
    """FSDP2 over one dim of the mesh, tensor parallel over the other."""
    mesh = two_by_two()
    share = mesh.get_local_rank("dp")
    plain, model = make(Wide), parallel(how, mesh["tp"])
    for layer in (*model.blocks, model):
        fully_shard(layer, mesh=mesh["dp"])
    rows = rows_of_all(plain, SIZES)
    found = losses(model, batch(share, SIZES[share]))
    own = {name: r[: SIZES[0]] if share == 0 else r[SIZES[0] :] for name, r in rows.items()}
    all_close(ps.grad(found, model, retain_graph=True), own)
    ps.backward(found, model, ps.ClippedSum(0.5), process_group=mesh.get_group("dp"))
    all_close({name: whole_of(p.grad) for name, p in model.named_parameters()}, clipped(rows, 0.5))


@pytest.mark.parametrize("how", ["plain", *[pytest.param(how, marks=pytest.mark.slow) for how in HOWS[1:]]])
def test_fsdp_of_a_tensor_parallel_model(four: Processes, how: str) -> None:
    four.run(sharded_and_parallel, how)
