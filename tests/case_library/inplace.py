"""In-place operations and writes into parts of tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, ints, param, score


@case()
def relu_inplace(B: int) -> Program:
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.ReLU(True), nn.Linear(5, 3))
    x = torch.randn(B, 4)
    return net, lambda: score(net(x))


@case()
def relu_inplace_in_cnn(B: int) -> Program:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(True), nn.Conv2d(4, 4, 3), nn.ReLU6(True))
    x = torch.randn(B, 3, 7, 7)
    return net, lambda: score(net(x))


@case({"dropout": {"kind": nn.Dropout}, "leaky": {"kind": nn.LeakyReLU}, "silu": {"kind": nn.SiLU}})
def other_inplace_modules(B: int, kind: type[nn.Module]) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 5), kind(inplace=True), nn.Linear(5, 3)), torch.randn(B, 4)
    return net, lambda: score(net(x))


@case()
def residual_added_inplace(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.randn(B, 3, 4)

    def losses() -> Tensor:
        h = net[0](x)
        h += net[1](h.tanh())
        h.mul_(0.5).add_(1.0)
        return score(h)

    return net, losses


@case()
def parameter_added_inplace(B: int) -> Program:
    net, b, g, x = nn.Linear(4, 3, bias=False), param(3), param(3), torch.randn(B, 4)
    return {"b": b, "g": g, "w": net.weight}, lambda: score(net(x).add_(b).mul_(g).sub_(b).tanh())


@case()
def parameter_written_into_a_buffer(B: int) -> Program:
    token, x = param(4), torch.randn(B, 3, 4)

    def losses() -> Tensor:
        h = torch.zeros(B, 4, 4)
        h[:, 0] = token
        h[:, 1:] = x
        return score((h.roll(1, 1) * h).tanh())

    return [token], losses


@case()
def slices_assigned(B: int) -> Program:
    net, x = nn.Linear(4, 2), torch.randn(B, 3, 4)

    def losses() -> Tensor:
        h = torch.zeros(B, 3, 4)
        h[:, :, :2] = net(x)
        h[:, 1, 2:] = net(x[:, 0]).tanh()
        return score(h.sin())

    return net, losses


@case(batches=(4, 1))
def samples_assigned_one_by_one(B: int) -> Program:
    net, x = nn.Linear(4, 3), torch.randn(B, 4)

    def losses() -> Tensor:
        h = net(x).tanh()
        out = torch.zeros(B, 3)
        for i in range(B):
            out[i] = h[B - 1 - i] * (i + 1)
        return score(out)

    return net, losses


@case()
def masked_fill_inplace(B: int) -> Program:
    net, x, mask = nn.Linear(4, 5), torch.randn(B, 3, 4), torch.rand(B, 3, 5) < 0.4
    return net, lambda: score(net(x).masked_fill_(mask, -3.0).softmax(-1))


@case()
def masked_assignment(B: int) -> Program:
    net, token, x = nn.Linear(4, 5), param(5), torch.randn(B, 3, 4)
    mask = torch.rand(B, 3) < 0.5
    mask[:, 0] = True

    def losses() -> Tensor:
        h = net(x)
        h[mask] = token
        return score(h.tanh() * x.sum(-1, keepdim=True))

    return {"token": token, **dict(net.named_parameters())}, losses


@case()
def masked_scatter(B: int) -> Program:
    net, x, image = nn.Embedding(6, 3), ints(6, B, 4), nn.Linear(2, 3)
    pixels, mask = torch.randn(B, 2, 2), torch.zeros(B, 4, 1, dtype=torch.bool)
    mask[:, 1:3] = True
    return nn.ModuleList([net, image]), lambda: score(net(x).masked_scatter(mask, image(pixels)).tanh())


@case()
def index_put_with_accumulation(B: int) -> Program:
    net, x, slot = nn.Linear(4, 3), torch.randn(B, 5, 4), ints(2, B, 5)
    row = torch.arange(B)[:, None].expand(B, 5)
    return net, lambda: score(torch.zeros(B, 2, 3).index_put((row, slot), net(x), accumulate=True).tanh())


@case()
def index_put_inplace(B: int) -> Program:
    net, x = nn.Linear(4, 3), torch.randn(B, 4)

    def losses() -> Tensor:
        out = torch.ones(B, 2, 3)
        out.index_put_((torch.arange(B), torch.arange(B) % 2), net(x))
        return score(out.cumprod(1))

    return net, losses


@case()
def scatter_add_inplace(B: int) -> Program:
    net, x, ids = nn.Linear(4, 5), torch.randn(B, 4), ints(3, B, 5)
    return net, lambda: score(torch.zeros(B, 3).scatter_add_(1, ids, net(x)).tanh())


@case()
def copied_into(B: int) -> Program:
    net, x = nn.Linear(4, 3), torch.randn(B, 4)

    def losses() -> Tensor:
        h = torch.empty(B, 3, dtype=torch.float32).double()
        h.copy_(net(x))
        h[:, 0].mul_(2.0)
        h.neg_()
        return score(h)

    return net, losses


@case()
def running_buffer(B: int) -> Program:
    net, x = nn.Linear(3, 3), torch.randn(B, 5, 3)

    def losses() -> Tensor:
        state, out = torch.zeros(B, 3), torch.empty(B, 5, 3)
        for t in range(5):
            state = (net(x[:, t]) + 0.5 * state).tanh()
            out[:, t] = state
        return score(out)

    return net, losses


@case()
def cache_written_by_index_copy(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B, 2, 3)
    return net, lambda: score(torch.zeros(B, 5, 4).index_copy_(1, torch.tensor([3, 1]), net(x)).cumsum(1).tanh())


@case()
def transposed_inplace(B: int) -> Program:
    net, x = nn.Linear(4, 3), torch.randn(B, 5, 4)
    return net, lambda: score(net(x).transpose_(1, 2).unsqueeze_(1).squeeze_(1).cumsum(2))


@case()
def dense_concatenation(B: int) -> Program:
    net = nn.ModuleList([nn.Conv2d(2 + 2 * i, 2, 3, padding=1) for i in range(3)])
    x = torch.randn(B, 2, 4, 4)

    def losses() -> Tensor:
        h = x
        for layer in net:
            h = torch.cat([h, F.relu_(layer(h))], 1)
        return score(h)

    return net, losses
