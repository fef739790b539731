"""Sums and moments over the samples of all ranks, whatever each of them has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import persample as ps
from persample.kernels.devices import looking
from tests.distributed.models import Unused, all_close, batch, clipped, close, losses, make, rows_of_all
from tests.distributed.processes import Processes, Worker
from tests.reference import definition, vectors

SIZES = [(3, 4), (3, 1), (0, 3), (1, 0)]


def padded(sizes: Sequence[int], world: int) -> list[int]:
    """Sizes for more ranks than were thought of."""
    return [sizes[rank % len(sizes)] for rank in range(world)]


def sums_of_all(rank: int, world: int, sizes: Sequence[int]) -> None:
    model, everybody = make(), dist.group.WORLD
    sizes = padded(sizes, world)
    rows, ids = rows_of_all(model, sizes), batch(rank, sizes[rank])
    weights = torch.linspace(0.5, 2.0, sum(sizes), dtype=torch.float64)
    mine = weights[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
    total, weighted, moment, variance = ps.reduce(
        losses(model, ids),
        model,
        ps.ClippedSum(0.5),
        ps.WeightedSum(mine),
        ps.SecondMoment(),
        ps.Variance(correction=0),
        process_group=everybody,
    )
    all_close(total, clipped(rows, 0.5))
    close(total.clipping.norms, vectors(definition(losses(model, ids), model)).norm(dim=1))
    all_close(weighted, {name: torch.einsum("b,b...->...", weights, r) for name, r in rows.items()})
    all_close(moment, {name: r.square().mean(0) for name, r in rows.items()})
    all_close(variance, {name: r.var(0, correction=0) for name, r in rows.items()})
    clipping = ps.backward(losses(model, ids), model, ps.ClippedSum(0.5), process_group=everybody)
    assert len(clipping.norms) == sizes[rank]
    all_close({name: p.grad for name, p in model.named_parameters()}, clipped(rows, 0.5))
    local = ps.clipped_sum(losses(model, ids), model, 0.5)
    all_close(local, clipped(definition(losses(model, ids), model), 0.5))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sums_over_ranks(several: Processes, sizes: Sequence[int]) -> None:
    several.run(sums_of_all, sizes)


def shortcuts(rank: int, world: int) -> None:
    model, sizes = make(), [2 + r for r in range(world)]
    rows, ids = rows_of_all(model, sizes), batch(rank, sizes[rank])
    moment = ps.second_moment(losses(model, ids), model, process_group=dist.group.WORLD)
    all_close(moment, {name: r.square().mean(0) for name, r in rows.items()})
    variance = ps.variance(losses(model, ids), model, process_group=dist.group.WORLD)
    all_close(variance, {name: r.var(0) for name, r in rows.items()})
    per = ps.clipped_sum(losses(model, ids), model, 0.1, per="parameter", process_group=dist.group.WORLD)
    all_close(per, {name: clipped({name: r}, 0.1)[name] for name, r in rows.items()})
    sequence = ps.clipped_sum(losses(model, ids), list(model.parameters()), 0.5, process_group=dist.group.WORLD)
    assert isinstance(sequence, tuple)
    close(sequence[0], clipped(rows, 0.5)["words.weight"])


def test_every_verb_that_has_a_sum(several: Processes) -> None:
    several.run(shortcuts)


def several_losses_each(rank: int, world: int, sizes: Sequence[int]) -> None:
    """All logits of every sample, on one rank of none at all."""
    model, everybody, sizes = make(), dist.group.WORLD, padded(sizes, world)
    every = [definition(model(batch(r, size)).flatten(), model) for r, size in enumerate(sizes)]
    rows = {name: torch.cat([stacks[name] for stacks in every]) for name in every[0]}
    logits = model(batch(rank, sizes[rank]))
    total, moment, variance = ps.reduce(
        logits,
        model,
        ps.ClippedSum(0.5),
        ps.SecondMoment(),
        ps.Variance(correction=0),
        process_group=everybody,
        max_memory=1,
        retain_graph=True,
    )
    all_close(total, clipped(rows, 0.5))
    assert total.clipping.weights.shape == logits.shape
    all_close(moment, {name: r.square().mean(0) for name, r in rows.items()})
    all_close(variance, {name: r.var(0, correction=0) for name, r in rows.items()})
    ps.backward(logits, model, ps.ClippedSum(0.5), process_group=everybody)
    all_close({name: p.grad for name, p in model.named_parameters()}, clipped(rows, 0.5))


@pytest.mark.parametrize("sizes", [(3, 4), (0, 3)], ids=str)
def test_several_losses_per_sample(several: Processes, sizes: Sequence[int]) -> None:
    several.run(several_losses_each, sizes)


def nobody_has_samples(rank: int, world: int) -> None:
    model = make(Unused)
    found = model(batch(rank, 0), extra=False).sum(1)
    ps.backward(found, model, ps.ClippedSum(1.0), process_group=dist.group.WORLD)
    assert model.extra.weight.grad is None
    assert model.head.weight.grad.abs().sum() == 0
    moment = ps.second_moment(model(batch(rank, 0)).sum(1), model, process_group=dist.group.WORLD)
    assert moment["head.bias"].isnan().all()


def test_no_samples_at_all(two: Processes) -> None:
    two.run(nobody_has_samples)


def reached_by_one(rank: int, world: int) -> None:
    """A parameter that only the samples of some ranks come to."""
    model, plain = make(Unused), make(Unused)

    def of(r: int, net: torch.nn.Module) -> Tensor:
        return net(batch(r, 3), extra=r % 2 == 0).square().sum(1)

    rows = [definition(of(r, plain), plain) for r in range(world)]
    every = {name: torch.cat([some[name] for some in rows]) for name in rows[0]}
    ps.backward(of(rank, model), model, ps.ClippedSum(0.5), process_group=dist.group.WORLD)
    reached = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert [name for name in every if name not in reached] == [name for name in every if name.startswith("blocks")]
    all_close(reached, {name: total for name, total in clipped(every, 0.5).items() if name in reached})
    variance = ps.variance(of(rank, model), model, process_group=dist.group.WORLD)
    all_close(variance, {name: r.var(0) for name, r in every.items()})


def test_a_parameter_that_one_rank_reaches(two: Processes) -> None:
    two.run(reached_by_one)


def not_finite(rank: int, world: int) -> None:
    """The error comes on all ranks, or the others would wait for the sum."""
    model = make()
    scale = torch.ones(3, dtype=torch.float64)
    scale[1] = float("nan") if rank == 1 else 1.0
    found = losses(model, batch(rank, 3)) * scale
    match = "of 1 of 3 samples are not finite: 1" if rank == 1 else "of 1 samples on other ranks are not finite"
    with pytest.raises(ps.NonFiniteError, match=match):
        ps.clipped_sum(found, model, 0.5, retain_graph=True, process_group=dist.group.WORLD)
    total = ps.clipped_sum(found, model, 0.5, nonfinite="drop", process_group=dist.group.WORLD)
    assert total.clipping.dropped == ([1] if rank == 1 else [])
    rows = rows_of_all(make(), [3] * world)
    all_close(total, clipped({name: torch.cat([r[:4], r[5:]]) for name, r in rows.items()}, 0.5))


def not_finite_without_looking(rank: int, world: int) -> None:
    with looking(False):
        not_finite(rank, world)


@pytest.mark.parametrize("worker", [not_finite, not_finite_without_looking])
def test_gradients_that_are_not_finite(two: Processes, worker: Worker) -> None:
    two.run(worker)


def half_precision(rank: int, world: int) -> None:
    """Sums over ranks are taken in float32, and given in the parameters' dtype."""
    model, ids = make().bfloat16(), batch(rank, 3)
    total = ps.clipped_sum(losses(model, ids), model, 0.5, process_group=dist.group.WORLD)
    assert {t.dtype for t in total.values()} == {torch.bfloat16}
    mine = ps.clipped_sum(losses(model, ids), model, 0.5)
    every: list[dict[str, Tensor]] = [{} for _ in range(world)]
    dist.all_gather_object(every, dict(mine))
    for name, t in total.items():
        torch.testing.assert_close(t.float(), sum(one[name].float() for one in every), rtol=2**-7, atol=1e-3)


def test_half_precision(two: Processes) -> None:
    two.run(half_precision)


def refusals(rank: int, world: int) -> None:
    model, everybody = make(), dist.group.WORLD
    found = losses(model, batch(rank, 3))
    for reduction in (ps.Norms(), ps.Gram(), ps.Stack(), ps.Project(ps.Projection(4, 0))):
        with pytest.raises(ValueError, match=f"{type(reduction).__name__} has rows .* leave out process_group="):
            ps.reduce(found, model, reduction, process_group=everybody)
    with pytest.raises(ValueError, match="Norms has rows for the samples of this process"):
        ps.norms(found, model, process_group=everybody)
    with pytest.raises(ValueError, match="Gram has rows for the samples of this process"):
        ps.gram(found, model, found, process_group=everybody)


def test_what_has_rows_is_refused(two: Processes) -> None:
    two.run(refusals)


def test_what_is_no_group() -> None:
    model = torch.nn.Linear(2, 1)
    found = model(torch.ones(3, 2)).sum(1)
    with pytest.raises(TypeError, match=r"process_group must be a .*ProcessGroup .* not str"):
        ps.backward(found, model, ps.ClippedSum(1.0), process_group="gloo")  # type: ignore[arg-type]
