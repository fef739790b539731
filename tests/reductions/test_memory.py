"""Peak memory, each measured in a process of its own: reductions stay near what a plain step holds anyway."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import persample as ps
from benchmarks import memory
from persample.factors import Dense, Factor, Outer, Workspace
from persample.reductions.run import Run

NOISE = 1e6  # bytes: an allocator's rounding, a library's own buffers


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize(
    "workload",
    [
        w if w == "mlp" else pytest.param(w, marks=pytest.mark.slow)
        for w in ("mlp", "cnn", "resnet", "depthwise", "gpt")
    ],
)
def test_peak_over_a_plain_step(workload: str) -> None:
    """At most 1.1 times the activations for a clipped sum, half of that for norms."""
    found = memory.peaks(workload, 2, ("plain", "norms", "clipped_sum"))
    held, plain = found["activations"], found["plain"]
    assert held > 2e6, "the forward pass was not measured"
    assert found["clipped_sum"] - plain <= 1.1 * held + NOISE
    assert found["norms"] - plain <= 0.55 * held + NOISE


def written_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every stack of outer products that is written out from now on."""
    sizes: list[int] = []
    stack = Outer.stack

    def recorded(self: Outer, out: torch.Tensor | None = None) -> torch.Tensor:
        sizes.append(self.stack_bytes)
        return stack(self, out)

    monkeypatch.setattr(Outer, "stack", recorded)
    return sizes


@pytest.mark.parametrize("max_memory", [0, 10_000, 100_000])
def test_max_memory_bounds_what_is_written_out(max_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences are written out a few samples at a time, one at least."""
    sizes = written_out(monkeypatch)
    model, x = nn.Linear(20, 30), torch.randn(32, 200, 20)
    for reductions in ([ps.Norms()], [ps.SecondMoment(), ps.Gram()]):
        ps.reduce(model(x).square().sum((1, 2)), model, *reductions, max_memory=max_memory)
    assert sizes
    assert max(sizes) <= max(max_memory, 3 * 20 * 30 * 4)  # inner products take whole rows of all samples


def test_a_long_sequence_builds_no_product_larger_than_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    bmm = torch.bmm

    def recorded(a: torch.Tensor, b: torch.Tensor, **kwargs: object) -> torch.Tensor:
        found = bmm(a, b, **kwargs)
        sizes.append(found[0].numel())
        return found

    monkeypatch.setattr(torch, "bmm", recorded)
    for T, p, d in [(300, 16, 16), (40, 64, 64), (1000, 8, 400), (700, 1500, 1500)]:
        Outer(torch.randn(2, T, p), torch.randn(2, T, d)).norms()
        assert max(sizes, default=0) <= p * d
        sizes.clear()


def test_stacks_are_kept_only_within_the_limit() -> None:
    """A stack that norms were read from serves the sum, too, if there is room, or if it is less than its factor."""
    large, small = (Outer(torch.randn(4, T, d), torch.randn(4, T, d)) for T, d in ((100, 210), (100, 8)))
    assert large.stack_bytes > large.nbytes
    assert small.stack_bytes < small.nbytes
    for factor, limit, kind in (
        (large, 0, Outer),
        (large, large.stack_bytes - 1, Outer),
        (large, large.stack_bytes, Dense),
        (small, 0, Dense),
    ):
        assert factor.prefers_stack(reused=True)
        assert type(Run([ps.ClippedSum(1.0)], call_for(factor, limit))._written_out_if_it_pays(factor)) is kind
        assert type(Run([ps.Norms()], call_for(factor, limit))._written_out_if_it_pays(factor)) is Outer  # asked once


def call_for(factor: Factor, limit: int) -> ps.Call:
    p = torch.zeros(factor.shape, requires_grad=True)
    return ps.Call({"p": p}, factor.batch, p.device, dict, Workspace(limit))
