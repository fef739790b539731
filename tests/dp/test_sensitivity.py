"""One sample more moves a release by its bound at most, and others' shares not at all: with data chosen to break it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import persample as ps
from persample import dp
from persample.dp.clips import Fixed, Following
from persample.kernels.convolution import use_costs
from persample.reductions.exact import ExactClippedSum, ExactSums
from tests.dp.helpers import plan

ONE = ps.ClippedSum(1.0)


def clipped(
    losses: Tensor, params: Mapping[str, Tensor], clip: ps.ClippedSum, samples: int
) -> tuple[Tensor, ExactSums]:
    """All sums as one vector, and how they came about."""
    found: ExactSums = ps.reduce(losses, params, ExactClippedSum(clip, samples), independent=True)[0]
    sums = {name: found.take(name) for name in params}
    return torch.cat([t.double().flatten() * found.units[n].size for n, t in sums.items() if t is not None]), found


def summed(model: nn.Module, x: Tensor, cotangents: Tensor, clip: ps.ClippedSum) -> Tensor:
    y = model(x)
    losses = ((y[0] if isinstance(y, tuple) else y) * cotangents).flatten(1).sum(1)
    return clipped(losses, dict(model.named_parameters()), clip, max(2**12, len(x)))[0]


def often(t: Tensor, times: int) -> Tensor:
    return t.expand(times, *t.shape[1:]).contiguous()


@pytest.mark.parametrize("samples", [10, 10**5], ids=["float64", "int64"])
def test_an_input_of_zeros(samples: int) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(5, 3), torch.randn(4, 5)
    x[1] = 0
    losses = F.cross_entropy(linear(x), torch.tensor([0, 1, 2, 0]), reduction="none")
    found = clipped(losses, dict(linear.named_parameters()), ps.ClippedSum(1.0), samples)[0]
    assert float(found.norm()) <= 4  # NaN, and 16 million


@pytest.mark.parametrize("samples", [10, 10**5], ids=["float64", "int64"])
def test_a_loss_of_zero_through_a_convolution(samples: int) -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(2, 3, 3), torch.randn(4, 2, 5, 5)
    losses = conv(x).flatten(1).sum(1) * torch.tensor([1.0, 0, 1, 1])
    found = clipped(losses, dict(conv.named_parameters()), ps.ClippedSum(1.0), samples)[0]
    assert float(found.norm()) <= 4


def test_what_memory_allows_to_write_out() -> None:
    """64 gradients of 128 x 128 take the 4 MB that are allowed at least; of 65, none are written out."""
    torch.manual_seed(1)
    linear, positions, batch = nn.Linear(128, 128, bias=False), 32, 64
    x, c = torch.randn(1, positions, 128), torch.randn(1, positions, 128)
    x[:, 16:], c[:, 16:] = x[:, :16] * (1 + 1e-3), -c[:, :16]
    few, more = (summed(linear, often(x, n), often(c, n), ps.ClippedSum(1.0)) for n in (batch, batch + 1))
    assert float((more - few).norm()) <= 1 + 1e-6  # 33


def test_ways_to_norms_of_convolutions() -> None:
    """Which way is fastest depends on how many samples there are: here, for 38 and for 39."""
    batch, size, channels = 38, 4, 32
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    x = torch.zeros(1, channels, size, size)
    x[:, 0] = torch.randn(size, size)
    null = torch.linalg.svd(F.unfold(x[:, :1], 3, padding=1)[0].double())[2][9:]
    c = (torch.randn(channels, 7).double() @ null).float().view_as(x) + 1e-3 * torch.randn_like(x)
    with use_costs("AVX512"):
        few, more = (summed(conv, often(x, n), often(c, n), ps.ClippedSum(1e-3)) for n in (batch, batch + 1))
    assert float((more - few).norm()) <= 1e-3 * (1 + 1e-6)  # 4.1e-3


def test_a_dropped_sample_changes_nobody_else() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(16, 16, batch_first=True)
    x, c = (often(torch.randn(1, 16, 16), 200) for _ in range(2))
    clip = ps.ClippedSum(1.0, nonfinite="drop")
    without, with_it = summed(lstm, x, c, clip), summed(lstm, torch.cat([x, x[:1] * math.nan]), often(c[:1], 201), clip)
    assert float((with_it - without).norm()) <= 1e-6  # 0.016


@pytest.mark.parametrize(("width", "batch"), [(3, 2**18 - 1), (64, 15999)])
def test_a_gradient_of_zero_changes_nobody_else(width: int, batch: int) -> None:
    torch.manual_seed(0)
    w = nn.Parameter(torch.zeros(width))
    for _ in range(4):
        x = often(torch.randn(1, width) * 3, batch)
        a, b = (
            clipped((t * w).sum(1), {"w": w}, ps.ClippedSum(1.0), batch + 1)[0] for t in (x, F.pad(x, (0, 0, 0, 1)))
        )
        assert float((a - b).norm()) <= 1e-6  # up to 0.027


def test_counts_of_samples_at_the_bound() -> None:
    torch.manual_seed(0)
    w, batch = nn.Parameter(torch.zeros(3)), 50_000
    following = Following(dp.AdaptiveClip(initial=1.0), plan(examples=10**6, batch_size=batch, delta=1e-8))

    def counted(x: Tensor) -> float:
        found = clipped((x * w).sum(1), {"w": w}, following.reduction(), batch + 1)[1]
        count = following.count(found.asked)
        assert count is not None
        return int(count) * following.counted_in.size / following._kappa

    for _ in range(10):
        row = torch.randn(1, 3)
        x = often((row / row.double().norm()).float(), batch)
        assert abs(counted(F.pad(x, (0, 0, 0, 1))) - counted(x)) <= 0.5 * (1 + 1e-6)  # 50,000


@pytest.mark.parametrize("clip", [ps.ClippedSum(1.0, gamma=1e-9), ps.ClippedSum(1e-7)], ids=["gamma", "small bound"])
def test_numbers_below_those_of_float16(clip: ps.ClippedSum) -> None:
    linear, x = nn.Linear(32, 32, bias=False), torch.full((2, 16, 32), 4.2e-5)
    with torch.autocast("cpu", dtype=torch.float16):
        y = linear(x)
    found = clipped((y * x).flatten(1).sum(1), dict(linear.named_parameters()), clip, 2)[0]
    assert float(found.norm()) <= 2 * clip.sensitivity  # 1024 and 18 times that


def test_a_batch_of_one_is_like_others() -> None:
    torch.manual_seed(0)
    linear, positions = nn.Linear(8, 8, bias=False), 16
    x, c = torch.randn(1, positions, 8), torch.randn(1, positions, 8) * 1e6
    x[:, 8:], c[:, 8:] = x[:, :8] * (1 + 1e-5), -c[:, :8]
    gradient = (c.double().mT @ x.double())[0]
    y, e = torch.zeros(1, positions, 8), torch.zeros(1, positions, 8)
    y[0, :8], e[0, :8] = torch.eye(8), -(gradient / gradient.norm() * 5).t().float()

    def released(data: TensorDataset) -> Tensor:
        every = plan(examples=len(data), batch_size=len(data), steps=1, noise_multiplier=0.0)
        private = dp.Private(linear, torch.optim.SGD(linear.parameters(), lr=0.0), every, ONE)
        for inputs, cotangents in private.batches(data):
            assert private.backward((linear(inputs) * cotangents).flatten(1).sum(1)).size == len(data)
        assert linear.weight.grad is not None
        return linear.weight.grad * len(data)

    alone, both = released(TensorDataset(x, c)), released(TensorDataset(torch.cat([x, y]), torch.cat([c, e])))
    assert float((both - alone).norm()) <= 1 + 1e-6  # 1.9989


def test_permuted_weights_train() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 6, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w.permute(1, 0, 2).reshape(6, 4)

    model, data = Model(), TensorDataset(torch.randn(60, 6))
    private = dp.Private(model, torch.optim.SGD(model.parameters(), lr=0.1), plan(), ps.ClippedSum(1.0), seed=0)
    for (x,) in private.batches(data):
        private.step(model(x).square().sum(1))
    assert private.steps == 6


def test_stated_sensitivities_of_groups() -> None:
    """The norms of gradients in bfloat16 that were rounded down, of shares that were not; in each of four groups."""
    linears = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(4)])
    x, c = torch.ones(2, 16, 32), torch.ones(2, 16, 32)
    x[:, 0] = 1.0625
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = torch.stack([(linear(x) * c).flatten(1).sum(1) for linear in linears]).sum(0)
    clip = ps.ClippedSum(weights=lambda norms: 0.5 / norms, per="parameter", sensitivity=1.0)
    params = dict(linears.named_parameters())
    found, how = clipped(losses, params, clip, 2)
    Fixed(clip, params).count(how.asked)
    assert float(found.norm()) <= 2  # 2 * 1.0039


def test_rounding_does_not_depend_on_others_scales() -> None:
    """A newcomer with sides of 1e30 and 1e-30 has the gradient of one with sides of 1 and 1."""
    torch.manual_seed(0)
    linear, batch = nn.Linear(2, 2, bias=False), 2000
    for _ in range(100):
        x, c = often(torch.randn(1, 2), batch), often(torch.randn(1, 2), batch)
        a, b = (
            summed(linear, torch.cat([x, torch.full((1, 2), 1 / s)]), torch.cat([c, torch.full((1, 2), s)]), ONE)
            for s in (1.0, 1e-30)
        )
        assert float((a - b).norm()) <= 1e-5  # up to 1e-3


def test_written_gradients_do_not_depend_on_where_they_lie() -> None:
    """Terms that cancel leave the rounding of a product, which depends on where in memory a sample begins."""
    size, positions, batch, worst = 5, 40, 400, 0.0
    linear, zero = nn.Linear(size, size, bias=False), torch.zeros(1, positions, size)
    for seed in range(15, 25):
        torch.manual_seed(seed)
        x, c = torch.zeros(batch, positions, size), torch.zeros(batch, positions, size)
        one = torch.randn(1, positions, size)
        x[3::4], c[3::4] = 1.1, (one - one.mean(1, keepdim=True)) * 1e9
        a, b = summed(linear, x, c, ONE), summed(linear, torch.cat([zero, x]), torch.cat([zero, c]), ONE)
        worst = max(worst, float((a - b).norm()))
    assert worst <= 1 + 1e-6  # 92.8


def test_kernels_of_convolutions() -> None:
    """Which one is fastest depends on how many samples there are: 198 and 199; each rounds differently."""
    batch, size = 198, 16
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 8, 3, bias=False), torch.zeros(1, 3, size, size)
    x[:, 0] = torch.randn(size, size)
    null = torch.linalg.svd(F.unfold(x[:, :1], 3)[0].double())[2][9:]
    c = (torch.randn(8, len(null)).double() @ null).float().view(1, 8, size - 2, size - 2) * 1e9
    with use_costs("AVX512"):
        few, more = (summed(conv, often(x, n), often(c, n), ONE) for n in (batch, batch + 1))
    assert float((more - few).norm()) <= 1 + 1e-6  # 263


def packed_sums(lengths: list[int], quiet: int | None = None) -> Tensor:
    """The exact sums of sequences of these lengths, packed; that of number ``quiet`` has a loss of zero."""
    torch.manual_seed(0)
    lstm, longest = nn.LSTM(8, 8, batch_first=True).double(), max(lengths)
    data = [torch.randn(n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in lengths]
    x = torch.stack([F.pad(t, (0, 0, 0, longest - len(t))) for t in data])
    out, _ = lstm(nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False))
    losses = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0].square().sum((1, 2)) * 1e3
    if quiet is not None:
        losses = losses * (torch.arange(len(lengths)) != quiet)
    return clipped(losses, dict(lstm.named_parameters()), ONE, 2**12)[0]


def test_a_longer_sequence_changes_nobody_else() -> None:
    """Padded to the longest, all others would be rounded as if they were as long."""
    few = [3, 5, 9, 17, 2, 5]
    without, with_it = packed_sums(few), packed_sums([*few, 400], quiet=6)
    assert float((with_it - without).norm()) <= 1e-9
    assert float((packed_sums([*few, 40]) - without).norm()) <= 1 + 1e-6


def test_a_sample_more_in_a_loop_changes_nobody_else() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(5, 4).double()
    xs = [torch.randn(n, 5, dtype=torch.float64) for n in (1, 3, 7, 40, 7)]

    def sums(xs: list[Tensor], scales: list[float]) -> Tensor:
        losses = torch.stack([linear(x).square().sum() * s for x, s in zip(xs, scales, strict=True)])
        return clipped(losses, dict(linear.named_parameters()), ONE, 2**12)[0]

    without = sums(xs, [1.0] * 5)
    assert float((sums([*xs, torch.randn(100, 5).double()], [1.0] * 5 + [0.0]) - without).norm()) <= 1e-9
    assert float((sums([*xs, torch.randn(33, 5).double()], [1.0] * 6) - without).norm()) <= 1 + 1e-6
