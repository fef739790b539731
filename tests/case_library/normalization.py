"""Normalisation layers with affine parameters, where samples do not interact."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Program, case, param, score, shaken


@case(
    {
        "2d": {"x": (6,), "shape": (6,)},
        "3d": {"x": (4, 6), "shape": (6,)},
        "two-dims": {"x": (3, 2, 5), "shape": (2, 5)},
        "all-dims": {"x": (2, 5), "shape": (2, 5)},
        "one-dim": {"x": (5,), "shape": (5,)},
        "no-bias": {"x": (4, 6), "shape": (6,), "bias": False},
    },
    batches=(4, 1, 0, 6),
)
def layer_norm(B: int, x: tuple[int, ...], shape: tuple[int, ...], bias: bool = True) -> Program:
    net, data = shaken(nn.LayerNorm(shape, bias=bias)), torch.randn(B, *x)
    return net, lambda: score(net(data))


@case(
    {
        "2d": {"x": (6,), "shape": (6,)},
        "3d": {"x": (4, 6), "shape": (6,)},
        "two-dims": {"x": (3, 2, 5), "shape": (2, 5)},
    }
)
def rms_norm(B: int, x: tuple[int, ...], shape: tuple[int, ...]) -> Program:
    net, data = shaken(nn.RMSNorm(shape)), torch.randn(B, *x)
    return net, lambda: score(net(data))


@case()
def rms_norm_by_hand(B: int) -> Program:
    g, x = param(6), torch.randn(B, 3, 6)
    return [g], lambda: score(g * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@case({"2d": {"x": (6,)}, "3d": {"x": (6, 5)}, "4d": {"x": (6, 3, 4)}, "5d": {"x": (6, 2, 3, 2)}})
def group_norm(B: int, x: tuple[int, ...]) -> Program:
    net, data = shaken(nn.GroupNorm(3, 6)), torch.randn(B, *x)
    return net, lambda: score(net(data))


@case({"one-group": {"groups": 1}, "a-group-per-channel": {"groups": 4}})
def group_norm_extremes(B: int, groups: int) -> Program:
    net, data = shaken(nn.GroupNorm(groups, 4)), torch.randn(B, 4, 3, 3)
    return net, lambda: score(net(data))


@case(
    {
        "1d": {"kind": nn.InstanceNorm1d, "x": (4, 6)},
        "2d": {"kind": nn.InstanceNorm2d, "x": (4, 3, 3)},
        "3d": {"kind": nn.InstanceNorm3d, "x": (4, 2, 3, 2)},
    },
    batches=(3, 1, 4),
)
def instance_norm(B: int, kind: type[nn.Module], x: tuple[int, ...]) -> Program:
    net, data = shaken(kind(4, affine=True)), torch.randn(B, *x)
    return net, lambda: score(net(data))


@case(batches=(4, 1))
def instance_norm_running_statistics(B: int) -> Program:
    net, data = shaken(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)), torch.randn(B, 3, 4, 4)
    return net.eval(), lambda: score(net(data))


@case(
    {
        "2d-input": {"kind": nn.BatchNorm1d, "x": (5,)},
        "3d-input": {"kind": nn.BatchNorm1d, "x": (5, 3)},
        "images": {"kind": nn.BatchNorm2d, "x": (5, 3, 2)},
        "volumes": {"kind": nn.BatchNorm3d, "x": (5, 2, 3, 2)},
    }
)
def batch_norm_eval(B: int, kind: type[nn.Module], x: tuple[int, ...]) -> Program:
    net, data = shaken(kind(5)).eval(), torch.randn(B, *x)
    net.running_mean.normal_()
    net.running_var.uniform_(0.5, 2.0)
    return net, lambda: score(net(data))


@case(dtype=torch.float32, rtol=1e-4)
def batch_norm_eval_float32(B: int) -> Program:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    x = torch.randn(B, 3, 7, 7)
    return shaken(net).eval(), lambda: score(net(x))


@case()
def batch_norm_eval_in_resnet(B: int) -> Program:
    net = nn.ModuleDict(
        {
            "a": nn.Conv2d(3, 3, 3, padding=1, bias=False),
            "n": nn.BatchNorm2d(3),
            "b": nn.Conv2d(3, 3, 3, padding=1),
        }
    )
    x = torch.randn(B, 3, 5, 5)
    return shaken(net).eval(), lambda: score(F.relu(x + net["b"](F.relu(net["n"](net["a"](x))))))


@case()
def batch_norm_eval_channels_last(B: int) -> Program:
    net = shaken(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).eval()
    net, x = net.to(memory_format=torch.channels_last), torch.randn(B, 3, 5, 5)
    return net, lambda: score(net(x.to(memory_format=torch.channels_last)))


@case()
def resnet_group_norm(B: int) -> Program:
    stem, a, b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    n, m, head = nn.GroupNorm(2, 4), nn.GroupNorm(2, 4), nn.Linear(4, 3)
    net = shaken(nn.ModuleList([stem, a, b, n, m, head]))
    x, y = torch.randn(B, 3, 7, 7), torch.randint(3, (B,))

    def losses() -> torch.Tensor:
        h = stem(x)
        h = F.relu(h + m(b(F.relu(n(a(h))))))
        return F.cross_entropy(head(h.mean((2, 3))), y, reduction="none")

    return net, losses


@case()
def layer_norm_channels_first(B: int) -> Program:
    net, x = shaken(nn.LayerNorm(4)), torch.randn(B, 4, 3, 5)
    return net, lambda: score(net(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


@case()
def layer_norm_after_linear(B: int) -> Program:
    net = shaken(nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6), nn.RMSNorm(6)))
    x = torch.randn(B, 3, 5)
    return net, lambda: score(net(x))


@case()
def layer_norm_time_first(B: int) -> Program:
    net, x = shaken(nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6))), torch.randn(3, B, 5)
    return net, lambda: score(net(x).transpose(0, 1))


@case()
def group_norm_of_folded_frames(B: int) -> Program:
    net, x = shaken(nn.GroupNorm(2, 4)), torch.randn(B, 3, 4, 5)
    return net, lambda: score(net(x.flatten(0, 1)).unflatten(0, (B, 3)))


@case(dtype=torch.float32, rtol=1e-4)
def group_norm_float32_channels_last(B: int) -> Program:
    net = shaken(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))).to(memory_format=torch.channels_last)
    x = torch.randn(B, 3, 6, 6).to(memory_format=torch.channels_last)
    return net, lambda: score(net(x))


@case()
def functional_layer_norm_with_computed_scale(B: int) -> Program:
    g, b, x = param(6), param(6), torch.randn(B, 3, 6)
    return [g, b], lambda: score(F.layer_norm(x, (6,), 1 + g, b.exp()))


@case()
def functional_group_norm_weight_only(B: int) -> Program:
    g, x = param(6), torch.randn(B, 6, 3)
    return [g], lambda: score(F.group_norm(x, 2, g))


@case()
def local_response_norm(B: int) -> Program:
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LocalResponseNorm(2)), torch.randn(B, 3, 5, 5)
    return net, lambda: score(net(x))
