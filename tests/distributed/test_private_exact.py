"""Sums of several processes are as exact as those of one: no sample moves them by more than the bound."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import persample as ps
from persample import dp
from tests.distributed.processes import Processes

BOUND = 0.5


def cast(precision: str) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()


def made(how: str, precision: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
    if precision == "bfloat16":
        model.bfloat16()
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp":
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        options: dict[str, Any] = {"mp_policy": half} if precision == "mixed" else {}
        fully_shard(model, **options)
    return model


def released(how: str, precision: str, clip: ps.ClippedSum, x: Tensor, y: Tensor) -> Tensor:
    """The sum of a step with all of the examples, without noise."""
    model = made(how, precision)
    plan = dp.Plan(examples=len(x), batch_size=len(x), steps=1, noise_multiplier=0.0, delta=1e-9, accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    masters = how != "fsdp"
    private = dp.Private(model, optimizer, plan, clip, masters=masters)
    for xs, ys in private.batches(TensorDataset(x, y), physical_batch_size=64):
        with cast(precision):
            losses = F.cross_entropy(model(as_model(xs, precision)).float(), ys, reduction="none")
        private.backward(losses)
    grads = [p.grad for p in model.parameters()]
    dtype = torch.bfloat16 if precision == "bfloat16" and not masters else torch.float32
    assert all(g is not None and g.dtype == dtype for g in grads)
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads if g is not None]
    return torch.cat([g.flatten() for g in whole]).double() * len(x)


def as_model(x: Tensor, precision: str) -> Tensor:
    return x.bfloat16() if precision == "bfloat16" else x


def neighbours(rank: int, world: int, how: str, precision: str) -> None:
    torch.manual_seed(1)
    for clip in (ps.ClippedSum(BOUND), ps.ClippedSum(BOUND, per="parameter")):
        x, y = torch.randn(1, 6).repeat(301, 1), torch.zeros(301, dtype=torch.long)
        x[200:] *= 1e-3
        parameters = sum(1 for _ in made("plain", precision).parameters())
        one = released(how, precision, clip, x, y) - released(how, precision, clip, x[1:], y[1:])
        assert 0.9 * BOUND < float(one.norm()) <= clip.sensitivity_for(parameters) * (1 + 1e-4)


@pytest.mark.parametrize("precision", ["float32", "autocast"])
@pytest.mark.parametrize("how", ["plain", "ddp", "fsdp"])
def test_one_sample_moves_the_sum_by_no_more_than_the_bound(two: Processes, how: str, precision: str) -> None:
    two.run(neighbours, how, precision)


def test_fsdp_with_weights_in_half_precision(two: Processes) -> None:
    two.run(neighbours, "fsdp", "mixed")


def in_bfloat16(rank: int, world: int, how: str) -> None:
    """Steps that are too small for bfloat16 are taken by the masters, alike in all processes."""
    model, alone = made(how, "bfloat16"), made("plain", "bfloat16")
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    plan = dp.Plan(examples=40, batch_size=10, steps=30, noise_multiplier=0.5, delta=1e-3, accountant="rdp")
    for net, team in ((model, None), (alone, dp.Team())):
        optimizer = torch.optim.SGD(net.parameters(), lr=3e-3, momentum=0.5)
        private = dp.Private(net, optimizer, plan, ps.ClippedSum(BOUND), seed=1, team=team)
        for xs, ys in private.batches(TensorDataset(x, y)):
            private.step(F.cross_entropy(net(xs.bfloat16()).float(), ys, reduction="none"))
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2**-7, atol=1e-3)  # gradients are those of other batches: of other shapes


@pytest.mark.parametrize("how", ["plain", "ddp"])
def test_parameters_in_bfloat16(two: Processes, how: str) -> None:
    two.run(neighbours, how, "bfloat16")
    two.run(in_bfloat16, how)


def sharded_in_bfloat16(rank: int, world: int) -> None:
    model = made("fsdp", "bfloat16")
    plan = dp.Plan(examples=40, batch_size=10, steps=2, noise_multiplier=0.5, delta=1e-3, accountant="rdp")
    with pytest.raises(ValueError, match="are in bfloat16 and sharded: keep them in float32"):
        dp.Private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, ps.ClippedSum(BOUND))
    released("fsdp", "bfloat16", ps.ClippedSum(BOUND), torch.randn(40, 6), torch.arange(40) % 3)  # by masters=False


def test_sharded_parameters_in_bfloat16(two: Processes) -> None:
    two.run(sharded_in_bfloat16)


def not_finite(rank: int, world: int) -> None:
    """One sample is left out, on whichever process it is."""
    torch.manual_seed(1)
    x, y = torch.randn(40, 6), torch.randint(3, (40,))
    clip = ps.ClippedSum(BOUND, nonfinite="drop")
    want = released("fsdp", "float32", clip, x[1:], y[1:])
    x[0] = torch.nan
    torch.testing.assert_close(released("fsdp", "float32", clip, x, y), want, rtol=1e-5, atol=1e-5)


def test_samples_that_are_not_finite_are_left_out(two: Processes) -> None:
    two.run(not_finite)
