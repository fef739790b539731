"""Convolutions in one, two and three dimensions, forward and transposed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Program, case, param, score

GEOMETRIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "one-by-one": {"kernel_size": 1},
    "even-kernel": {"kernel_size": 2},
    "stride": {"stride": 2},
    "stride-beyond-kernel": {"kernel_size": 2, "stride": 3},
    "padding": {"padding": 1},
    "dilation": {"dilation": 2, "padding": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "out_channels": 4},
    "depthwise-multiplier": {"groups": 4, "out_channels": 8, "padding": 1, "stride": 2},
    "all": {"stride": 2, "padding": 2, "dilation": 2, "groups": 2, "bias": False},
    "same": {"padding": "same"},
    "same-uneven": {"padding": "same", "kernel_size": 4},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate": {"padding": 1, "padding_mode": "replicate"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "circular-wide": {"padding": 2, "padding_mode": "circular", "stride": 2, "groups": 2},
    "reflect-same": {"padding": "same", "padding_mode": "reflect", "kernel_size": 4},
}

TRANSPOSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "stride": {"stride": 2},
    "output-padding": {"stride": 3, "output_padding": 2, "padding": 1},
    "dilation": {"dilation": 2, "output_padding": 1, "stride": 2},
    "groups": {"groups": 2, "stride": 2, "output_padding": 1},
    "depthwise": {"groups": 4, "out_channels": 8, "padding": 1},
}


def _layer(kind: type[nn.Module], options: dict[str, Any]) -> nn.Module:
    """A convolution from 4 channels, 6 out and kernel 3 unless told otherwise."""
    return kind(4, **{"out_channels": 6, "kernel_size": 3, **options})


@case({name: {"options": options} for name, options in GEOMETRIES.items()})
def conv1d(B: int, options: dict[str, Any]) -> Program:
    net, x = _layer(nn.Conv1d, options), torch.randn(B, 4, 9)
    return net, lambda: score(net(x))


@case({name: {"options": options} for name, options in GEOMETRIES.items()}, batches=(4, 1, 0, 3))
def conv2d(B: int, options: dict[str, Any]) -> Program:
    net, x = _layer(nn.Conv2d, options), torch.randn(B, 4, 6, 7)
    return net, lambda: score(net(x))


@case({name: {"options": options} for name, options in GEOMETRIES.items()})
def conv3d(B: int, options: dict[str, Any]) -> Program:
    net, x = _layer(nn.Conv3d, options), torch.randn(B, 4, 5, 6, 5)
    return net, lambda: score(net(x))


@case({name: {"options": options} for name, options in TRANSPOSED.items()})
def conv_transpose1d(B: int, options: dict[str, Any]) -> Program:
    net, x = _layer(nn.ConvTranspose1d, options), torch.randn(B, 4, 5)
    return net, lambda: score(net(x))


@case({name: {"options": options} for name, options in TRANSPOSED.items()})
def conv_transpose2d(B: int, options: dict[str, Any]) -> Program:
    net, x = _layer(nn.ConvTranspose2d, options), torch.randn(B, 4, 4, 3)
    return net, lambda: score(net(x))


@case({name: {"options": options} for name, options in TRANSPOSED.items()})
def conv_transpose3d(B: int, options: dict[str, Any]) -> Program:
    net, x = _layer(nn.ConvTranspose3d, options), torch.randn(B, 4, 3, 2, 3)
    return net, lambda: score(net(x))


@case({"plain": {}, "depthwise": {"groups": 4, "out_channels": 4}, "stride": {"stride": 2, "padding": 1}})
def conv2d_channels_last(B: int, **options: Any) -> Program:
    net = _layer(nn.Conv2d, options).to(memory_format=torch.channels_last)
    x = torch.randn(B, 4, 6, 7).to(memory_format=torch.channels_last)
    return net, lambda: score(net(x))


@case(batches=(32, 1))
def conv3d_channels_last_dilated(B: int) -> Program:
    net = nn.Conv3d(2, 3, 2, dilation=2).to(memory_format=torch.channels_last_3d)
    x = torch.randn(B, 2, 4, 4, 4).to(memory_format=torch.channels_last_3d)
    return net, lambda: score(net(x))


@case()
def conv2d_anisotropic(B: int) -> Program:
    net = nn.Conv2d(3, 4, (3, 1), stride=(1, 2), padding=(2, 0), dilation=(2, 1))
    x = torch.randn(B, 3, 5, 6)
    return net, lambda: score(net(x))


@case()
def conv2d_circular_anisotropic(B: int) -> Program:
    net, x = nn.Conv2d(3, 4, (3, 5), padding=(1, 3), padding_mode="circular"), torch.randn(B, 3, 5, 6)
    return net, lambda: score(net(x))


@case(dtype=torch.float32, rtol=1e-4)
def conv2d_float32(B: int) -> Program:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2))
    x = torch.randn(B, 3, 8, 8)
    return net, lambda: score(net(x))


@case(batches=(4, 1))
def conv2d_unbatched_loop(B: int) -> Program:
    net, x = nn.Conv2d(3, 4, 3), torch.randn(B, 3, 5, 5)
    return net, lambda: torch.stack([net(one).square().mean() for one in x])


@case()
def conv1d_causal(B: int) -> Program:
    net, x = nn.Conv1d(3, 3, 4, groups=3, padding=3), torch.randn(B, 6, 3)
    return net, lambda: score(F.silu(net(x.transpose(1, 2))[..., :6]).transpose(1, 2))


@case()
def conv2d_functional_raw_weight(B: int) -> Program:
    w, b, x = param(4, 3, 3, 3), param(4), torch.randn(B, 3, 6, 6)
    return [w, b], lambda: score(F.conv2d(x, w * 2.0, b.tanh(), padding=1))


@case()
def conv2d_fixed_filter(B: int) -> Program:
    net, blur = nn.Conv2d(1, 3, 3), torch.randn(3, 1, 3, 3)
    x = torch.randn(B, 1, 7, 7)
    return net, lambda: score(F.conv2d(net(x), blur, groups=3))


@case()
def conv2d_frames_folded_into_batch(B: int) -> Program:
    net, x = nn.Conv2d(3, 2, 3), torch.randn(B, 3, 3, 5, 5)
    return net, lambda: score(net(x.flatten(0, 1)).unflatten(0, (B, 3)))


@case()
def conv_autoencoder(B: int) -> Program:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(4, 1, 3, stride=2, padding=1, output_padding=1),
    )
    x = torch.randn(B, 1, 8, 8)
    return net, lambda: (net(x) - x).square().mean((1, 2, 3))


@case()
def depthwise_separable(B: int) -> Program:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU6(),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.ReLU6(),
        nn.Conv2d(6, 5, 1),
    )
    x, y = torch.randn(B, 3, 7, 7), torch.randint(5, (B,))
    return net, lambda: F.cross_entropy(net(x).mean((2, 3)), y, reduction="none")


@case()
def conv2d_large_kernel(B: int) -> Program:
    net, x = nn.Conv2d(2, 3, 7, padding=3), torch.randn(B, 2, 5, 5)
    return net, lambda: score(net(x))


@case()
def conv2d_kernel_of_whole_image(B: int) -> Program:
    net, x = nn.Conv2d(3, 4, 5), torch.randn(B, 3, 5, 5)
    return net, lambda: score(net(x).flatten(1))


@case(
    {"plain": {}, "padding": {"pad": 2}, "one-by-one": {"length": 1}, "frozen-bias": {"frozen": True}},
    nodes=("ConvTbcBackward0",),
)
def conv_tbc(B: int, length: int = 3, pad: int = 0, frozen: bool = False) -> Program:
    w, b, x = param(length, 4, 6), param(6), torch.randn(4, B, 4)  # PyTorch wants a contiguous cotangent
    return [w] if frozen else [w, b], lambda: torch.conv_tbc(x, w, b, pad).sin().square().sum((0, 2))
