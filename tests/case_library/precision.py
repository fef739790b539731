"""Reduced and mixed precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, ints, param, score, shaken

BF16 = {"dtype": torch.bfloat16, "rtol": 6e-2}
MIXED = {"dtype": torch.float32, "rtol": 6e-2}


def _autocast(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Run under CPU autocast and leave the losses in float32."""

    def losses() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward().float()

    return losses


@case(**MIXED)
def autocast_mlp(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(B, 4)
    y = ints(3, B)
    return net, _autocast(lambda: F.cross_entropy(net(x).float(), y, reduction="none"))


@case(**MIXED)
def autocast_cnn(B: int) -> Program:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2))
    x = torch.randn(B, 3, 7, 7)
    return shaken(net), _autocast(lambda: score(net(x).float()))


@case(**MIXED)
def autocast_transformer(B: int) -> Program:
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    x = torch.randn(B, 5, 8)
    return shaken(net), _autocast(lambda: score(net(x).float()))


@case(**MIXED)
def autocast_tied_weights(B: int) -> Program:
    """The cast of a weight is cached: both uses share one bfloat16 copy."""
    net, x = nn.Linear(4, 4), torch.randn(B, 4)
    return net, _autocast(lambda: score(net(net(x).tanh()).float()))


@case(**MIXED)
def autocast_raw_parameters(B: int) -> Program:
    w, b, x = param(4, 3), param(3), torch.randn(B, 5, 4)
    return [w, b], _autocast(lambda: score((x @ w + b).float()))


@case(**MIXED)
def autocast_embedding(B: int) -> Program:
    net, x = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6)), ints(6, B, 5)
    return net, _autocast(lambda: F.cross_entropy(net(x).mT.float(), x, reduction="none").mean(1))


@case(batches=(4, 1), **MIXED)
def autocast_recurrent(B: int) -> Program:
    net, x = nn.GRU(3, 4, batch_first=True), torch.randn(B, 5, 3)
    return net, _autocast(lambda: score(net(x)[0].float()))


@case(**BF16)
def bfloat16_mlp(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(B, 4)
    return net, lambda: score(net(x))


@case(**BF16)
def bfloat16_cnn(B: int) -> Program:
    net, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2)),
        torch.randn(B, 3, 6, 6),
    )
    return net, lambda: score(net(x)).float()


@case(**BF16)
def bfloat16_norms(B: int) -> Program:
    net = shaken(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.RMSNorm(4)))
    x = torch.randn(B, 3, 4)
    return net, lambda: score(net(x))


@case(**BF16)
def bfloat16_embedding_float_loss(B: int) -> Program:
    net, x = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6)), ints(6, B, 5)
    return net, lambda: F.cross_entropy(net(x).mT.float(), x, reduction="none").mean(1)


@case(batches=(4, 1), **BF16)
def bfloat16_lstm(B: int) -> Program:
    net, x = nn.LSTM(3, 4, batch_first=True), torch.randn(B, 5, 3)
    return net, lambda: score(net(x)[0])


@case(**BF16)
def bfloat16_attention(B: int) -> Program:
    net, x = shaken(nn.MultiheadAttention(8, 2, batch_first=True)), torch.randn(B, 5, 8)
    return net, lambda: score(net(x, x, x, need_weights=False)[0])


@case(dtype=torch.float16, rtol=2e-2)
def float16_mlp(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(B, 4)
    return net, lambda: score(net(x))


@case(dtype=torch.float16, rtol=2e-2, batches=(4, 17, 1))
def float16_reordered(B: int) -> Program:
    """The range of float16 is narrow: scaling a sample by 2^16 leaves it."""
    net, x, order = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)]), torch.randn(B, 4), torch.randperm(B)
    return net, lambda: score(net[1](net[0](x).relu()[order]))


@case(dtype=torch.float32, rtol=1e-4, batches=(4, 16, 1))
def float32_reordered_near_overflow(B: int) -> Program:
    net, x, order = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)]), torch.randn(B, 4), torch.randperm(B)
    return net, lambda: score(net[1](net[0](x).relu()[order])) * 1e35


@case(dtype=torch.float32, rtol=2e-2)
def master_weights(B: int) -> Program:
    w, b, x = param(3, 4), param(3), torch.randn(B, 4).bfloat16()
    return [w, b], lambda: score(F.linear(x, w.bfloat16(), b.bfloat16()).float())


@case(dtype=torch.float32, rtol=1e-4)
def float32_transformer(B: int) -> Program:
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(B, 5, 8)
    return shaken(net), lambda: score(net(x))


@case(dtype=torch.float32, rtol=1e-4)
def float32_model_float64_losses(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(B, 4)
    return net, lambda: score(net(x).double())


@case()
def losses_of_every_scale(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(B, 4)
    return net, lambda: score(net(x)) * 10.0 ** torch.arange(0, -B, -1)


@case()
def large_and_small_samples(B: int) -> Program:
    net, x = nn.Linear(4, 3), torch.randn(B, 4) * 1e3 ** torch.arange(B)[:, None]
    return net, lambda: net(x).tanh().sum(1) + net(x).abs().log1p().sum(1)
