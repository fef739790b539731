"""Pooling, resampling, folding and other image operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, param, score

# Every operation takes (B, 4, 6, 6) and keeps the sample in front.
IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "max-pool": lambda h: F.max_pool2d(h, 2),
    "max-pool-overlapping": lambda h: F.max_pool2d(h, 3, stride=1, padding=1),
    "max-pool-dilated": lambda h: F.max_pool2d(h, 2, dilation=2, ceil_mode=True),
    "avg-pool": lambda h: F.avg_pool2d(h, 3, stride=2, padding=1, count_include_pad=False),
    "lp-pool": lambda h: F.lp_pool2d(h, 2, 2),
    "adaptive-avg": lambda h: F.adaptive_avg_pool2d(h, (4, 5)),
    "adaptive-avg-one": lambda h: F.adaptive_avg_pool2d(h, 1),
    "adaptive-max": lambda h: F.adaptive_max_pool2d(h, (4, 5)),
    "fractional": lambda h: F.fractional_max_pool2d(h, 2, output_size=3),
    "max-unpool": lambda h: F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), 2),
    "pixel-shuffle": lambda h: F.pixel_shuffle(h, 2).cumsum(-1),
    "pixel-unshuffle": lambda h: F.pixel_unshuffle(h, 2).cumsum(1),
    "channel-shuffle": lambda h: F.channel_shuffle(h, 2).cumsum(1),
    "nearest": lambda h: F.interpolate(h, scale_factor=2),
    "nearest-exact": lambda h: F.interpolate(h, size=(4, 9), mode="nearest-exact"),
    "bilinear": lambda h: F.interpolate(h, size=(8, 5), mode="bilinear", align_corners=False),
    "bilinear-corners": lambda h: F.interpolate(h, size=(8, 5), mode="bilinear", align_corners=True),
    "bicubic": lambda h: F.interpolate(h, size=(8, 5), mode="bicubic"),
    "antialiased": lambda h: F.interpolate(h, size=(3, 4), mode="bilinear", antialias=True),
    "area": lambda h: F.interpolate(h, size=(3, 2), mode="area"),
    "unfold": lambda h: F.unfold(h, 3, padding=1, stride=2),
    "unfold-fold": lambda h: F.fold(F.unfold(h, 2, stride=2).sin(), (6, 6), 2, stride=2),
    "pad-constant": lambda h: F.pad(h, (1, 0, 2, 1), value=0.3).cumsum(-1),
    "pad-reflect": lambda h: F.pad(h, (1, 2, 0, 1), mode="reflect").cumsum(-1),
    "pad-replicate": lambda h: F.pad(h, (1, 2, 0, 1), mode="replicate").cumsum(-1),
    "pad-circular": lambda h: F.pad(h, (1, 2, 0, 1), mode="circular").cumsum(-1),
    "crop": lambda h: F.pad(h, (-1, -1, -2, 0)).cumsum(-1),
    "roll": lambda h: h.roll((1, -2), (2, 3)) * h,
    "dropout2d": lambda h: F.dropout2d(h, 0.4),
    "flatten": lambda h: h.flatten(2).mT.tanh(),
}


@case({name: {"op": op} for name, op in IMAGES.items()}, batches=(4, 1))
def image(B: int, op: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(B, 3, 6, 6)
    return net, lambda: score(op(net(x)))


EMPTY = (
    "max-pool",
    "avg-pool",
    "adaptive-avg",
    "adaptive-avg-one",
    "bilinear",
    "nearest",
    "pixel-shuffle",
    "pad-constant",
)


@case({name: {"op": IMAGES[name]} for name in EMPTY}, batches=(0, 4))
def image_empty_batch(B: int, op: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(B, 3, 6, 6)
    return net, lambda: score(op(net(x)))


SIGNALS: dict[str, Callable[[Tensor], Tensor]] = {
    "max-pool": lambda h: F.max_pool1d(h, 2),
    "avg-pool": lambda h: F.avg_pool1d(h, 3, stride=1),
    "adaptive-avg": lambda h: F.adaptive_avg_pool1d(h, 3),
    "adaptive-max": lambda h: F.adaptive_max_pool1d(h, 3),
    "lp-pool": lambda h: F.lp_pool1d(h, 2, 2),
    "linear": lambda h: F.interpolate(h, size=11, mode="linear"),
    "nearest": lambda h: F.interpolate(h, size=11),
    "pad-reflect": lambda h: F.pad(h, (2, 1), mode="reflect").cumsum(-1),
    "frames": lambda h: h.unfold(-1, 3, 2).sin(),
}


@case({name: {"op": op} for name, op in SIGNALS.items()}, batches=(4, 1))
def signal(B: int, op: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.Conv1d(3, 4, 3, padding=1), torch.randn(B, 3, 7)
    return net, lambda: score(op(net(x)))


VOLUMES: dict[str, Callable[[Tensor], Tensor]] = {
    "max-pool": lambda h: F.max_pool3d(h, 2),
    "avg-pool": lambda h: F.avg_pool3d(h, 2),
    "adaptive-avg": lambda h: F.adaptive_avg_pool3d(h, 2),
    "adaptive-max": lambda h: F.adaptive_max_pool3d(h, 2),
    "trilinear": lambda h: F.interpolate(h, size=(3, 5, 4), mode="trilinear"),
    "nearest": lambda h: F.interpolate(h, scale_factor=2),
    "pad-replicate": lambda h: F.pad(h, (1, 1, 0, 1, 1, 0), mode="replicate").cumsum(-1),
    "pad-circular": lambda h: F.pad(h, (1, 1, 0, 1, 1, 0), mode="circular").cumsum(-1),
}


@case({name: {"op": op} for name, op in VOLUMES.items()}, batches=(4, 1))
def volume(B: int, op: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.Conv3d(2, 2, 3, padding=1), torch.randn(B, 2, 4, 4, 4)
    return net, lambda: score(op(net(x)))


@case({mode: {"mode": mode} for mode in ("bilinear", "nearest", "bicubic")}, batches=(4, 1))
def grid_sample(B: int, mode: str) -> Program:
    net, x, grid = nn.Conv2d(3, 4, 3), torch.randn(B, 3, 6, 6), torch.rand(B, 5, 3, 2) * 2 - 1
    return net, lambda: score(F.grid_sample(net(x), grid, mode=mode, align_corners=False))


@case(
    {"zeros": {}, "border": {"padding_mode": "border"}, "reflection": {"padding_mode": "reflection"}},
    batches=(4, 1),
)
def spatial_transformer(B: int, **options: str) -> Program:
    net = nn.ModuleList([nn.Linear(12, 6), nn.Conv2d(3, 2, 3)])
    x = torch.randn(B, 3, 6, 6)

    def losses() -> Tensor:
        theta = net[0](F.adaptive_avg_pool2d(x, 2).flatten(1)).view(B, 2, 3)
        grid = F.affine_grid(theta, [B, 3, 6, 6], align_corners=False)
        return score(net[1](F.grid_sample(x, grid, align_corners=False, **options)))

    return net, losses


@case(batches=(4, 1), slow_path=True)
def interpolated_position_embedding(B: int) -> Program:
    pos, x = param(1, 4, 3, 3), torch.randn(B, 4, 5, 5)
    return [pos], lambda: score((x + F.interpolate(pos, size=(5, 5), mode="bicubic")).tanh())


@case(batches=(4, 1))
def learned_image_sampled_per_sample(B: int) -> Program:
    plane, grid = param(1, 4, 5, 5), torch.rand(B, 3, 3, 2) * 2 - 1
    return [plane], lambda: score(F.grid_sample(plane.expand(B, -1, -1, -1), grid, align_corners=True).sin())


@case(batches=(4, 1), slow_path=True)
def learned_image_padded_and_unfolded(B: int) -> Program:
    plane, x = param(1, 2, 4, 4), torch.randn(B, 2, 4, 4)
    return [plane], lambda: score(F.unfold(x * plane.exp(), 2) * F.unfold(F.pad(plane, (0, 1)), 2)[:, :, :9])


@case(batches=(4, 1))
def unet(B: int) -> Program:
    down, mid = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    up, out = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, 2, 1)
    x, y = torch.randn(B, 3, 8, 8), torch.randint(2, (B, 8, 8))

    def losses() -> Tensor:
        a = down(x).relu()
        b = up(mid(F.max_pool2d(a, 2)).relu())
        return F.cross_entropy(out(torch.cat([a, b], 1)), y, reduction="none").mean((1, 2))

    return nn.ModuleList([down, mid, up, out]), losses


@case(batches=(4, 1))
def patches_by_unfold(B: int) -> Program:
    net, x = nn.Linear(12, 3), torch.randn(B, 3, 6, 6)
    return net, lambda: score(net(F.unfold(x, 2, stride=2).mT).tanh())


@case(batches=(4, 1))
def patches_by_reshape(B: int) -> Program:
    net, x = nn.Linear(12, 3), torch.randn(B, 3, 6, 6)
    return net, lambda: score(net(x.view(B, 3, 3, 2, 3, 2).permute(0, 2, 4, 3, 5, 1).reshape(B, 9, 12)).tanh())


@case(batches=(4, 1))
def two_crops_folded(B: int) -> Program:
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()), torch.randn(B, 3, 7, 7)
    return net, lambda: score(net(torch.cat([x, x.flip(3)])).view(2, B, 4, 5, 5).transpose(0, 1).cumsum(1))


@case(batches=(4, 1))
def neural_style_gram(B: int) -> Program:
    net, x = nn.Conv2d(3, 4, 3), torch.randn(B, 3, 6, 6)
    return net, lambda: score((lambda f: f @ f.mT)(net(x).relu().flatten(2)).tanh())
