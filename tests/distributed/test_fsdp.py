"""Models sharded by FSDP2: full per-sample gradients for the local batch, and FSDP as if nothing had happened."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import persample as ps
from persample.distributed.shards import _groups
from tests.distributed.models import (
    CLASSES,
    WIDTH,
    Net,
    all_close,
    batch,
    clipped,
    close,
    losses,
    make,
    rows_of_all,
)
from tests.distributed.processes import Processes
from tests.reference import definition, vectors

WRAPS = ("blocks", "whole")
SIZES = (3, 4, 2, 5)


def shard(model: nn.Module, wraps: str = "blocks", reshard: bool | None = None, **options: Any) -> nn.Module:
    """The root alone, or every block and the root."""
    if wraps == "blocks":
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard, **options)
    return fully_shard(model, reshard_after_forward=reshard, **options)


def summing(model: nn.Module) -> nn.Module:
    """FSDP's gradients as sums over ranks, by its public options."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def full_grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def own(rows: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    start = sum(SIZES[:rank])
    return {name: r[start : start + SIZES[rank]] for name, r in rows.items()}


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that FSDP knows of itself, by the module's name: names that a later release adds, too."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            members = [plain_values(vars(g)) for g in _groups(state)]
            found[name] = [*map(plain_values, (vars(state), vars(state._state_ctx), vars(state._comm_ctx))), members]
    return found


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Flags and numbers as they are, lists and the like by what they hold; of other objects whether there is one."""
    simple = (bool, int, float, str, Enum)
    return {
        name: value
        if isinstance(value, simple)
        else (len(value), [v for v in value if isinstance(v, simple)])
        if isinstance(value, list | tuple | dict | set)
        else value is None
        for name, value in values.items()
    }


def every_verb(rank: int, world: int, wraps: str, reshard: bool | None, **options: Any) -> None:
    plain, sharded = make(), shard(make(), wraps, reshard, **options)
    ids = batch(rank, SIZES[rank])
    rows = definition(losses(plain, ids), plain)
    found = losses(sharded, ids)
    before = state_of(sharded)
    all_close(ps.grad(found, sharded, retain_graph=True), rows)
    close(ps.norms(found, sharded, retain_graph=True, independent=True), vectors(rows).norm(dim=1))
    per = ps.norms(found, sharded, per=[sharded.blocks, [sharded.words], ["head.weight"]], retain_graph=True)
    close(per[0], vectors({n: r for n, r in rows.items() if n.startswith("blocks")}).norm(dim=1))
    close(ps.gram(found, sharded, retain_graph=True), vectors(rows) @ vectors(rows).t())
    close(ps.gram(found, sharded, found, retain_graph=True), vectors(rows) @ vectors(rows).t())
    direction = {name: torch.ones_like(p) for name, p in plain.named_parameters()}
    close(ps.dot(found, sharded, direction, retain_graph=True), vectors(rows).sum(1))
    projection = ps.Projection(dim=8, seed=0)
    close(ps.project(found, sharded, projection, retain_graph=True), ps.project(losses(plain, ids), plain, projection))
    all_close(ps.second_moment(found, sharded, retain_graph=True), {n: r.square().mean(0) for n, r in rows.items()})
    all_close(ps.clipped_sum(found, sharded, 0.5, retain_graph=True), clipped(rows, 0.5))
    assert state_of(sharded) == before
    assert not full_grads(sharded)
    again = ps.grad(losses(sharded, ids), sharded)
    all_close(again, rows)
    assert ps.explain(losses(sharded, ids), sharded).rows[0].parameter == "words.weight"


@pytest.mark.parametrize("wraps", WRAPS)
def test_the_last_call_leaves_what_a_backward_leaves(two: Processes, wraps: str) -> None:
    two.run(after_the_last_call, wraps)


def after_the_last_call(rank: int, world: int, wraps: str) -> None:
    one, other = shard(make(), wraps), shard(make(), wraps)
    for step in range(2):
        ids = batch(rank, 3, step)
        losses(other, ids).sum().backward()
        other.zero_grad()
        ps.norms(losses(one, ids), one)
        assert state_of(one) == state_of(other)
    if hasattr(one, "set_manual_backward_finalization"):  # from torch 2.15 on: refused while a backward is unfinished
        one.set_manual_backward_finalization(True)
        ps.norms(losses(one, batch(rank, 3)), one)
        one.set_manual_backward_finalization(False)


@pytest.mark.parametrize(
    ("wraps", "reshard"),
    [
        ("blocks", None),
        ("blocks", True),
        ("whole", False),
        *[
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("blocks", False), ("whole", True), ("whole", None))
        ],
    ],
)
def test_every_verb_gives_full_gradients_of_the_local_batch(
    several: Processes, wraps: str, reshard: bool | None
) -> None:
    several.run(every_verb, wraps, reshard)


def train(rank: int, world: int, kind: type[nn.Module], wraps: str, reshard: bool | None, **options: Any) -> None:
    """Norms first, then an ordinary weighted backward; some steps by `ps.backward`, all against plain models."""
    plain, sharded = make(kind), summing(shard(make(kind), wraps, reshard, **options))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, sharded)]
    sizes = SIZES[:world]
    for step in range(4):
        rows = rows_of_all(plain, sizes, step)
        found = losses(sharded, batch(rank, sizes[rank], step))
        if step % 2:
            ps.backward(found, sharded, ps.ClippedSum(0.5), process_group=dist.group.WORLD)
        else:
            norms = ps.norms(found, sharded, retain_graph=True)
            close(norms, vectors(own(rows, rank)).norm(dim=1))
            ((0.5 / norms).clamp(max=1) * found).sum().backward()
        all_close(full_grads(sharded), clipped(rows, 0.5))
        for name, p in plain.named_parameters():
            p.grad = clipped(rows, 0.5)[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    all_close(
        {name: p.full_tensor() for name, p in sharded.named_parameters()},
        {name: p.detach() for name, p in plain.named_parameters()},
    )


class Merged(Net):
    """The head's weight is computed from others, which is pulled back after the engine is done."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(CLASSES, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(x.mean(1), self.head.weight * torch.tanh(self.left @ self.right), self.head.bias)


class Tied(Net):
    """Words are guessed by the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return x.mean(1) @ self.words.weight.t()


@pytest.mark.parametrize("kind", [Net, Merged, Tied])
def test_training_does_what_a_plain_model_does(several: Processes, kind: type[nn.Module]) -> None:
    several.run(train, kind, "blocks", None)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("wraps", WRAPS)
def test_training_with_all_wraps(two: Processes, wraps: str, reshard: bool) -> None:
    two.run(train, Net, wraps, reshard)


def uneven(rank: int, world: int, size: int) -> None:
    """One rank has one sample or none, another has enough for several probes: all gather the same."""
    plain, sharded = make(), shard(make())
    mine = size if rank == 0 else 20

    def mixed(model: nn.Module) -> Tensor:
        """A matrix that moves samples and does not mix them: data decide."""
        ids = batch(rank, mine)
        order = torch.eye(mine, dtype=torch.float64).flip(0)
        return (order @ model(ids)).square().sum(1)

    all_close(ps.grad(losses(sharded, batch(rank, mine)), sharded), definition(losses(plain, batch(rank, mine)), plain))
    all_close(ps.grad(mixed(sharded), sharded), definition(mixed(plain), plain))
    ps.backward(losses(sharded, batch(rank, mine)), sharded, ps.ClippedSum(0.5), process_group=dist.group.WORLD)
    all_close(full_grads(sharded), clipped(rows_of_all(plain, [size] + [20] * (world - 1)), 0.5))


@pytest.mark.parametrize("size", [0, 1, 3])
def test_ranks_with_few_samples(two: Processes, size: int) -> None:
    two.run(uneven, size)


def containers(rank: int, world: int) -> None:
    """Mappings and sequences of sharded parameters, frozen ones beside them; before and after a forward pass."""
    plain, sharded = make(), make()
    for model in (plain, sharded):
        model.words.weight.requires_grad_(False)
    shard(sharded)
    ids = batch(rank, 3)
    rows = definition(losses(plain, ids), plain)
    assert "words.weight" not in rows
    early = dict(sharded.named_parameters())
    all_close(ps.grad(losses(sharded, ids), early), rows)
    found = losses(sharded, ids)
    some = [sharded.head.weight, early["blocks.0.up.weight"]]
    first, second = ps.grad(found, some, retain_graph=True)
    close(first, rows["head.weight"])
    close(second, rows["blocks.0.up.weight"])
    out = {name: torch.empty_like(r) for name, r in rows.items()}
    assert ps.grad(found, sharded, out=out)["head.bias"] is out["head.bias"]
    all_close(out, rows)


def test_parameters_in_any_container(two: Processes) -> None:
    two.run(containers)


def beside(rank: int, world: int) -> None:
    """Parameters of no sharded module, above and below a sharded one."""
    plain, sharded = make(), shard(make())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        prompt = nn.Parameter(torch.randn(4).double())
        scale = nn.Parameter(torch.randn(5).double())

    def through(model: nn.Module) -> Tensor:
        return (model.blocks[0](prompt + torch.ones(3, 4).double() * (rank + 1)) * scale[:4]).square().sum(1)

    want = definition(through(plain), {"prompt": prompt, "scale": scale})
    for _ in range(2):
        found = through(sharded)
        all_close(ps.grad(found, {"prompt": prompt, "scale": scale}, retain_graph=True), want)
        found.sum().backward()
        sharded.zero_grad()
        prompt.grad = scale.grad = None


def test_parameters_beside_a_sharded_module(two: Processes) -> None:
    two.run(beside)


def after_an_error(rank: int, world: int) -> None:
    """What is refused half way leaves a model that can be trained."""
    plain, sharded = make(), summing(shard(make()))
    ids = batch(rank, 3)
    found = sharded(ids)
    before = state_of(sharded)
    with pytest.raises(ps.InteractionError):
        ps.norms((found - found.mean(0)).square().sum(1), sharded, independent=True, retain_graph=True)

    class Boom(ps.Reduction):
        def start(self, call: ps.Call) -> None: ...

        def add(self, name: str, factor: ps.Factor) -> None:
            raise ZeroDivisionError(name)

        def result(self) -> None: ...

    with pytest.raises(ZeroDivisionError):
        ps.reduce(found.square().sum(1), sharded, Boom(), retain_graph=True)
    assert state_of(sharded) == before
    found.square().sum().backward()
    rows = [definition(plain(batch(r, 3)).square().sum(1), plain) for r in range(world)]
    all_close(full_grads(sharded), {name: sum(one[name].sum(0) for one in rows) for name in rows[0]})


def test_training_goes_on_after_an_error(two: Processes) -> None:
    two.run(after_an_error)


def recomputed(rank: int, world: int, reentrant: bool) -> None:
    """Checkpointed blocks are run again during the backward, by FSDP's own hooks."""

    class Checkpointed(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x.mean(1))

    plain, sharded = make(Net), summing(shard(make(Checkpointed)))
    rows = rows_of_all(plain, SIZES[:world])
    found = losses(sharded, batch(rank, SIZES[rank]))
    close(ps.norms(found, sharded, retain_graph=True), vectors(own(rows, rank)).norm(dim=1))
    found.sum().backward()
    all_close(full_grads(sharded), {name: r.sum(0) for name, r in rows.items()})


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(two: Processes, reentrant: bool) -> None:
    two.run(recomputed, reentrant)


def mixed_precision(rank: int, world: int) -> None:
    """Rows are in the dtype that the model computes in, gradients in that of the sharded parameters."""
    plain = make().bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = shard(make().float(), mp_policy=policy)
    ids = batch(rank, 3)
    got = ps.grad(losses(sharded, ids), sharded)
    want = definition(losses(plain, ids), plain)
    for name, r in want.items():
        assert got[name].dtype == torch.bfloat16
        torch.testing.assert_close(got[name], r, rtol=0.05, atol=0.02)
    ps.backward(losses(sharded, ids), sharded, ps.ClippedSum(1.0), process_group=dist.group.WORLD)
    assert {p.grad.dtype for p in sharded.parameters()} == {torch.float32}


def test_mixed_precision(two: Processes) -> None:
    two.run(mixed_precision)


def accumulated(rank: int, world: int) -> None:
    """Gradients that FSDP was told not to reduce yet are still there afterwards."""
    plain, sharded = make(), summing(shard(make()))
    rows = [rows_of_all(plain, [3] * world, step) for step in range(2)]
    sharded.set_requires_gradient_sync(False)
    losses(sharded, batch(rank, 3, 0)).sum().backward()
    sharded.set_requires_gradient_sync(True)
    found = losses(sharded, batch(rank, 3, 1))
    close(ps.norms(found, sharded, retain_graph=True), vectors(rows[1]).norm(dim=1)[3 * rank : 3 * rank + 3])
    found.sum().backward()
    all_close(full_grads(sharded), {name: rows[0][name].sum(0) + rows[1][name].sum(0) for name in rows[0]})


def test_accumulated_gradients(two: Processes) -> None:
    two.run(accumulated)


def refusals(rank: int, world: int) -> None:
    sharded = shard(make())
    found = losses(sharded, batch(rank, 3))
    with pytest.raises(ps.UnsupportedError, match=r"parameters \['words.weight', .* are sharded, .* process_group="):
        ps.backward(found, sharded, ps.ClippedSum(1.0))
    assert not full_grads(sharded)
    with pytest.raises(RuntimeError, match=r"module is sharded, .* use ps\.grad"):
        ps.call_for_per_sample_grads(shard(make()))


def test_a_local_sum_has_no_room_in_a_shard(two: Processes) -> None:
    two.run(refusals)


def other_kinds(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    tensor_parallel = parallelize_module(nn.Sequential(nn.Linear(4, 6)), mesh, {"0": ColwiseParallel()})
    with pytest.raises(
        ps.UnsupportedError, match=r"\['0.weight', '0.bias'\] are DTensors.* with these very parameters"
    ):
        ps.grad(nn.Linear(4, 6)(torch.ones(2, 4)).sum(1), tensor_parallel)
    for use_orig in (True, False):
        flat_model = FullyShardedDataParallel(nn.Linear(4, 6), use_orig_params=use_orig, device_id=torch.device("cpu"))
        with pytest.raises(ps.UnsupportedError, match=r"are parts of a flat one .*fully_shard instead"):
            ps.grad(flat_model(torch.ones(2, 4)).sum(1), flat_model)


def test_other_ways_to_shard_are_refused(two: Processes) -> None:
    two.run(other_kinds)


def several_losses_each(rank: int, world: int, wraps: str) -> None:
    """One backward per position, and the modules are sharded again at the end."""
    plain, model, ids = make(), shard(make(), wraps), batch(rank, SIZES[rank])
    rows = definition(plain(ids).flatten(), plain)
    for memory in (None, 1):
        norms, total = ps.reduce(model(ids), model, ps.Norms(), ps.ClippedSum(0.5), max_memory=memory)
        close(norms.flatten(), vectors(rows).norm(dim=1))
        all_close(total, clipped(rows, 0.5))
    losses(model, ids).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("wraps", WRAPS)
def test_several_losses_per_sample(two: Processes, wraps: str) -> None:
    two.run(several_losses_each, wraps)
