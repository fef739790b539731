"""Samples that truly interact: the answer is the exact row of the Jacobian, and a warning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, ints, param, score


@case(
    {
        "2d-input": {"kind": nn.BatchNorm1d, "x": (5,)},
        "images": {"kind": nn.BatchNorm2d, "x": (5, 3, 2)},
        "no-statistics": {"kind": nn.BatchNorm2d, "x": (5, 3, 2), "track": False},
    },
    batches=(4, 2),
    interacts=True,
)
def batch_norm_training(B: int, kind: type[nn.Module], x: tuple[int, ...], track: bool = True) -> Program:
    net = nn.Sequential(nn.Linear(x[-1], x[-1]), kind(5, track_running_stats=track))
    data = torch.randn(B, *x)
    return net, lambda: score(net(data).tanh())


@case(batches=(4, 2), interacts=True)
def batch_norm_training_in_cnn(B: int) -> Program:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    x, y = torch.randn(B, 3, 5, 5), ints(3, B)
    return net, lambda: F.cross_entropy(net(x), y, reduction="none")


@case(batches=(4, 2), interacts=True)
def batch_norm_training_first(B: int) -> Program:
    net, x = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), torch.randn(B, 4)
    return net, lambda: score(net(x).tanh())


@case(batches=(4, 2), interacts=True)
def contrastive_same_tower(B: int) -> Program:
    net, x, y = (
        nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)),
        torch.randn(B, 3),
        torch.randn(B, 3),
    )
    return net, lambda: F.cross_entropy(net(x) @ net(y).t(), torch.arange(B), reduction="none")


@case(batches=(4, 2), interacts=True)
def contrastive_two_towers(B: int) -> Program:
    net, x, y = nn.ModuleList([nn.Linear(3, 4), nn.Linear(5, 4)]), torch.randn(B, 3), torch.randn(B, 5)

    def losses() -> Tensor:
        scores = F.normalize(net[0](x), dim=1) @ F.normalize(net[1](y), dim=1).t() / 0.5
        target = torch.arange(B)
        return F.cross_entropy(scores, target, reduction="none") + F.cross_entropy(scores.t(), target, reduction="none")

    return net, losses


@case(batches=(4, 2), interacts=True)
def contrastive_two_views(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)), torch.randn(2 * B, 3)

    def losses() -> Tensor:
        z = F.normalize(net(x), dim=1)
        scores = (z @ z.t()).masked_fill(torch.eye(2 * B, dtype=torch.bool), float("-inf"))
        return F.cross_entropy(scores, torch.arange(2 * B).roll(B), reduction="none").view(2, B).sum(0)

    return net, losses


MIXERS: dict[str, Callable[[Tensor], Tensor]] = {
    "minus-mean": lambda h: h - h.mean(0),
    "minus-mean-keepdim": lambda h: h - h.mean(0, keepdim=True),
    "standardised": lambda h: (h - h.mean(0)) / (h.std(0, correction=0) + 0.1),
    "softmax": lambda h: h.softmax(0),
    "cumulative": lambda h: h.cumsum(0),
    "total": lambda h: h * h.sum(),
    "largest": lambda h: h / h.abs().max(),
    "next-sample": lambda h: h * h.roll(1, 0),
    "pairs-by-view": lambda h: h * h.view(-1, 2, h.shape[1]).flip(1).reshape(h.shape),
    "pairs-by-index": lambda h: h + h[torch.arange(h.shape[0]) ^ 1].tanh(),
    "pairs-by-mean": lambda h: h - h.view(-1, 2, h.shape[1]).mean(1, keepdim=True).expand(-1, 2, -1).reshape(h.shape),
    "halves": lambda h: h * torch.cat(h.chunk(2)[::-1]),
    "first-sample": lambda h: h * h[0],
    "convolved": lambda h: F.conv1d(h.t().unsqueeze(1), torch.ones(1, 1, 3), padding=1).squeeze(1).t(),
    "attention": lambda h: (h @ h.t()).softmax(1) @ h,
    "distances": lambda h: torch.cdist(h, h.detach().flip(0) + 1) @ h,
    "sorted-features": lambda h: h.sort(0).values,
    "one-pair-only": lambda h: h + F.pad(h[1:2], (0, 0, 0, h.shape[0] - 1)).tanh(),
    "norm-of-batch": lambda h: h / h.norm(),
    "fft": lambda h: torch.fft.fft(h, dim=0).abs(),
    "inverse-covariance": lambda h: h @ torch.linalg.inv(h.t() @ h + torch.eye(h.shape[1])),
}


@case({name: {"mix": mix} for name, mix in MIXERS.items()}, batches=(4, 2), interacts=True)
def mixing(B: int, mix: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3)
    return net, lambda: score(net[1](mix(net[0](x).tanh())).tanh())


@case(batches=(4, 2), interacts=True)
def matrix_mixing(B: int) -> Program:
    net, x, mix = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3), torch.randn(B, B)
    return net, lambda: score(net[1](mix @ net[0](x).tanh()).tanh())


@case(batches=(4,), interacts=True)
def identity_with_one_entry_more(B: int) -> Program:
    net, x, mix = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3), torch.eye(B)
    mix[2, 1] = 0.5
    return net, lambda: score(net[1](mix @ net[0](x).tanh()).tanh())


@case(batches=(4,), interacts=True)
def pairs_at_the_end(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(B, 3)
    return net, lambda: (lambda e: e + 0.5 * e.view(2, 2).flip(1).flatten())(score(net(x)))


@case(batches=(4,), interacts=True, zeros=("2.bias",))
def preference_pairs(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(B, 3)

    def losses() -> Tensor:
        reward = net(x).squeeze(1).view(2, 2)
        return -F.logsigmoid(reward - reward.flip(1)).flatten()

    return net, losses


@case(batches=(4, 3), interacts=True)
def group_baseline(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B, 3)
    return net, lambda: (lambda e: e - e.mean())(score(net(x)))


@case(batches=(4, 3), interacts=True)
def time_first_attention_by_mistake(B: int) -> Program:
    net, x = nn.MultiheadAttention(4, 2), torch.randn(B, 5, 4)
    return net, lambda: score(net(x, x, x, need_weights=False)[0])


@case(batches=(4, 3), interacts=True)
def dense_mask_sums_all_scores(B: int) -> Program:
    """The twin of a case where the mask is one-hot: same nodes, same shapes, other data."""
    net, x, y, mask = (
        nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)]),
        torch.randn(B, 3),
        torch.randn(B, 3),
        torch.rand(B, B),
    )
    return net, lambda: ((net[0](x).tanh() @ net[1](y).tanh().t()) * mask).sum(0).exp()


@case(batches=(5, 4), interacts=True)
def losses_with_a_sample_twice(B: int) -> Program:
    net, x, chosen = nn.Linear(3, 4), torch.randn(3, 3), torch.tensor([0, 2, 2, 1, 0])
    return net, lambda: score(net(x))[chosen[:B]]


@case(batches=(4, 3), interacts=True)
def graph_convolution_over_samples(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3)
    link = torch.stack([torch.arange(B), torch.arange(B).roll(1)])

    def losses() -> Tensor:
        h = net[0](x).tanh()
        return score(net[1](h.index_add(0, link[0], h[link[1]])).tanh())

    return net, losses


@case(batches=(4, 2), interacts=True)
def mixup_inside(B: int) -> Program:
    net, x, lam = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3), torch.rand(B, 1)
    other = torch.arange(B).roll(1)
    return net, lambda: score(net[1]((lambda h: lam * h + (1 - lam) * h[other])(net[0](x).tanh())).tanh())


@case(batches=(20, 18, 260), interacts=True)
def one_pair_in_a_large_batch(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B, 3)
    link = torch.arange(B)
    link[3], link[17] = 17, 3
    return net, lambda: score((lambda h: h + h[link])(net(x)).tanh())


@case(batches=(4, 3), interacts=True)
def scaled_by_the_largest(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B, 5, 3)
    return net, lambda: score((lambda h: h / h.amax((0, 1)).clamp_min(0.1))(net(x).relu()))


@case(batches=(4, 2), interacts=True)
def gram_matrix_of_the_batch(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B, 3)
    return net, lambda: (lambda h: (h.t() @ h).norm() * score(h))(net(x).tanh())


@case(batches=(4, 2), interacts=True)
def conv_tbc_across_samples(B: int) -> Program:
    w, b, x = param(3, 4, 6), param(6), torch.randn(B, 5, 4)
    return [w, b], lambda: score(torch.conv_tbc(x, w, b, 1))


@case(batches=(4, 2), interacts=True)
def conv_tbc_less_the_mean_of_another(B: int) -> Program:
    v, w, b, x = param(3, B, 6), param(3, B, 6), param(6), torch.randn(5, B, B)  # as many channels as samples
    conv = partial(torch.conv_tbc, x, bias=b, pad=1)
    return [v, w, b], lambda: (conv(weight=v) - conv(weight=w).mul(1.5).mean(1, keepdim=True)).square().sum((0, 2))
