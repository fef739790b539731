"""Samples that meet in ratios of small whole numbers must not be taken for one sample.

A probe scales sample i by a power of two and reads the ratio. Samples 0 and 2 in the ratio 2 : 1, scaled by 2 and 8,
give (2·2 + 1·8) / 3 = 4, which looks like sample 1. Counts of neighbours and filters of whole numbers do that.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from persample.graph.execute.plan import plan
from persample.graph.read.roots import Roots
from tests.graph.claims import refuted_cotangents

DATA = torch.tensor([[0.7, 0.2]], dtype=torch.float64)


class Spread(torch.autograd.Function):
    """One number times whole numbers, one per sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return counts * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (counts,) = ctx.saved_tensors
        return (counts * g).sum(0, keepdim=True), None


def spread(x: Tensor, counts: list[int]) -> Tensor:
    return Spread.apply(x, torch.tensor(counts, dtype=x.dtype))


def taken(x: Tensor, counts: list[int]) -> Tensor:
    """The same by reading one element again and again."""
    reads = torch.tensor([i for i, n in enumerate(counts) for _ in range(n)])
    return x.new_zeros(len(counts)).index_add(0, reads, x.take(torch.zeros_like(reads)))


def gathered(x: Tensor, counts: list[int]) -> Tensor:
    reads = torch.tensor([i for i, n in enumerate(counts) for _ in range(n)])
    return x.new_zeros(len(counts)).scatter_add(0, reads, x.gather(0, torch.zeros_like(reads)))


def product(x: Tensor, counts: list[int]) -> Tensor:
    return torch.tensor(counts, dtype=x.dtype).unsqueeze(1) @ x


def convolved(x: Tensor, counts: list[int]) -> Tensor:
    kernel = torch.tensor(counts, dtype=x.dtype).reshape(1, 1, -1)
    return torch.nn.functional.conv_transpose1d(x.reshape(1, 1, 1), kernel).reshape(-1)


def refuted(way: Any, counts: list[int]) -> list[str]:
    p = torch.tensor([0.3, 0.1], dtype=torch.float64, requires_grad=True)
    losses = way((DATA @ p).sin(), counts)
    return refuted_cotangents(plan(Roots.of_losses(losses), [p]), losses)


@pytest.mark.parametrize("way", [spread, taken, gathered, product, convolved])
@pytest.mark.parametrize("B", [2, 3, 4])
def test_small_counts(way: Any, B: int) -> None:
    highest = {2: 9, 3: 5, 4: 3}[B]
    for counts in itertools.product(range(highest), repeat=B):
        if sum(counts):
            assert refuted(way, list(counts)) == [], counts


@pytest.mark.parametrize("B", [2, 3])
def test_small_differences(B: int) -> None:
    for counts in itertools.product(range(-4, 5), repeat=B):
        assert refuted(spread, list(counts)) == [], counts


@pytest.mark.parametrize("B", [5, 9, 16, 17, 40])
@pytest.mark.parametrize("way", [spread, taken, gathered])
def test_counts_among_many_samples(way: Any, B: int) -> None:
    generator = torch.Generator().manual_seed(B)
    for _ in range(20):
        counts = torch.randint(1, 5, (B,), generator=generator) * (torch.rand(B, generator=generator) < 3 / B)
        counts[0] += 1
        assert refuted(way, counts.tolist()) == [], counts.tolist()
