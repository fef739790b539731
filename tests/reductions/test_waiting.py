"""Parts of one factor wait for one another: results are the same, and nothing else waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import persample as ps
from persample.factors import Factor
from persample.reductions.norms import ParameterNorms
from tests.reference import definition

DEPTH = 12


class Deep(nn.Module):
    """Many small layers of a few shapes, half of them in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.ModuleList(nn.Linear(5, 5) for _ in range(DEPTH))
        self.broad = nn.ModuleList(nn.Linear(5, 5).double() for _ in range(DEPTH))
        self.scale = nn.ParameterList(nn.Parameter(torch.ones(5).double()) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for narrow, broad, scale in zip(self.narrow, self.broad, self.scale, strict=True):
            x = x + broad(narrow(x.float()).tanh().double()) * scale
        return x


def losses_of(net: Deep, B: int, T: int) -> Tensor:
    torch.manual_seed(1)
    return net(torch.randn(B, T, 5).double()).square().sum((1, 2))


@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("B", [0, 1, 2, 6])
def test_norms_and_sums_of_many_layers(B: int, T: int) -> None:
    torch.manual_seed(0)
    net = Deep()
    rows = definition(losses_of(net, B, T), net)
    want = {name: g.double().flatten(1).norm(dim=1) for name, g in rows.items()}
    every, total = ps.reduce(losses_of(net, B, T), net, ps.Norms("parameter"), ps.ClippedSum(1.0))
    whole = torch.stack(list(want.values())).norm(dim=0)
    torch.testing.assert_close(total.clipping.norms, whole, rtol=1e-6, atol=1e-9)
    weights = (1 / whole).clamp(max=1)
    for name, g in rows.items():
        torch.testing.assert_close(every[name], want[name], rtol=1e-5, atol=1e-7)
        summed = torch.tensordot(weights, g.double(), 1).to(g.dtype)
        torch.testing.assert_close(total[name], summed, rtol=1e-4, atol=1e-6)


def test_a_sample_that_is_dropped_leaves_nothing() -> None:
    torch.manual_seed(0)
    net, x = Deep(), torch.randn(4, 3, 5).double()

    def losses(x: Tensor) -> Tensor:
        return net(x).square().sum((1, 2))

    want = ps.clipped_sum(losses(x[[0, 1, 3]]), net, max_norm=1.0)
    x[2, 1, 0] = float("nan")
    found = ps.clipped_sum(losses(x), net, max_norm=1.0, nonfinite="drop")
    assert found.clipping.dropped == [2]
    for name in want:
        torch.testing.assert_close(found[name], want[name], rtol=1e-5, atol=1e-7)


def test_only_parts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of a factor of its own are computed when it comes; those of parts once, when all of them have come."""
    asked: list[int] = []
    compute = ParameterNorms._compute

    def noted(self: ParameterNorms, names: list[str], factor: Factor) -> None:
        asked.append(len(names))
        compute(self, names, factor)

    monkeypatch.setattr(ParameterNorms, "_compute", noted)
    net = Deep()
    ps.norms(losses_of(net, 6, 2), net)
    assert sum(asked) == len(list(net.parameters()))
    assert max(asked) == asked[-1] == DEPTH - 1 or max(asked) == DEPTH
    assert asked.count(1) >= DEPTH  # the scales, which are in no bundle
