"""Python control flow: scans of thousands of steps, loops over samples, branches on data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, ints, param, score


@case(batches=(3, 1))
def long_cumulative_loop(B: int) -> Program:
    w, x = param(2), torch.randn(B, 2)

    def losses() -> Tensor:
        h = x * w
        for _ in range(3000):
            h = h * 0.999 + x
        return score(h / 1000)

    return [w], losses


@case(batches=(3, 1))
def long_scan_with_weights(B: int) -> Program:
    decay, x = param(2), torch.randn(1000, B, 2)

    def losses() -> Tensor:
        a, h, total = decay.sigmoid(), torch.zeros(B, 2), torch.zeros(B, 2)
        for step in x:
            h = a * h + step
            total = total + h
        return score(total / 100)

    return [decay], losses


@case(batches=(3, 1))
def deep_chain_of_small_layers(B: int) -> Program:
    net, x = nn.Linear(2, 2), torch.randn(B, 2)

    def losses() -> Tensor:
        h = x
        for _ in range(400):
            h = h + 0.01 * net(h).tanh()
        return score(h)

    return net, losses


@case(batches=(3, 1))
def deep_chain_on_the_weight(B: int) -> Program:
    w, x = param(3, 3), torch.randn(B, 3)

    def losses() -> Tensor:
        weight = w
        for _ in range(1500):
            weight = weight * 0.9995
        return score(x @ weight)

    return [w], losses


@case(batches=(3, 1, 0))
def selective_scan(B: int) -> Program:
    net, log_a, skip = nn.Linear(4, 4 + 2 + 2), param(4, 2), param(4)
    x = torch.randn(B, 6, 4)
    params = {"log_a": log_a, "skip": skip, **dict(net.named_parameters())}

    def losses() -> Tensor:
        step, b, c = net(x).split([4, 2, 2], -1)
        step = F.softplus(step)
        decay = torch.exp(-step[..., None] * log_a.exp())
        state, out = torch.zeros(B, 4, 2), []
        for t in range(6):
            state = decay[:, t] * state + step[:, t, :, None] * b[:, t, None] * x[:, t, :, None]
            out.append((state * c[:, t, None]).sum(-1))
        return score(torch.stack(out, 1) + skip * x)

    return params, losses


@case(batches=(4, 1))
def loop_over_samples(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(B, 3)
    return net, lambda: torch.stack([net(one).square().sum() for one in x])


@case(batches=(4, 1))
def loop_over_samples_of_batch_one(B: int) -> Program:
    net, x = nn.Sequential(nn.Conv1d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU()), torch.randn(B, 2, 6)
    return net, lambda: torch.cat([score(net(one[None])) for one in x])


@case(batches=(4, 1))
def loop_over_samples_of_other_lengths(B: int) -> Program:
    net = nn.ModuleList([nn.Embedding(6, 3), nn.Linear(3, 6)])
    texts = [ints(6, n) for n in (3, 1, 5, 2)[:B]]
    return net, lambda: torch.stack([F.cross_entropy(net[1](net[0](t).tanh()), t) for t in texts])


@case(batches=(4, 1))
def loop_over_samples_of_raw_parameters(B: int) -> Program:
    w, b, x = param(3, 3), param(3), torch.randn(B, 3)
    return [w, b], lambda: torch.stack([(w @ one + b).tanh().dot(one) for one in x])


@case(batches=(4, 6, 1))
def loop_over_pieces_of_the_batch(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(B, 3)
    return net, lambda: torch.cat([score(net(part)) for part in x.split(2)])


@case(batches=(4, 1))
def loop_in_another_order(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B, 3)

    def losses() -> Tensor:
        out = [torch.zeros(())] * B
        for i in torch.randperm(B).tolist():
            out[i] = net(x[i]).square().sum()
        return torch.stack(out)

    return net, losses


@case(batches=(4, 1))
def loop_after_a_batched_layer(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4)]), torch.randn(B, 3)
    return net, lambda: torch.stack([net[1](h).sin().sum() for h in net[0](x).tanh()])


@case(batches=(4, 1))
def batched_layer_after_a_loop(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4)]), torch.randn(B, 3)
    return net, lambda: score(net[1](torch.stack([net[0](one).tanh() for one in x])))


@case(batches=(6, 1))
def branch_on_data(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), torch.randn(B, 3)

    def losses() -> Tensor:
        rows = []
        for one in x:
            h = net[0](one)
            rows.append(net[1](h) if h.sum().item() > 0 else h.exp())
        return score(torch.stack(rows))

    return net, losses


@case(zeros=("1.weight", "1.bias"))
def branch_on_the_whole_batch(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), torch.randn(B, 3)

    def losses() -> Tensor:
        h = net[0](x)
        return score(net[1](h) if h.abs().sum().item() < 0 else h.sin())

    return net, losses


@case(batches=(4, 1, 0))
def early_exit_by_mask(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)]), torch.randn(B, 3)

    def losses() -> Tensor:
        h, alive = x, torch.arange(B)
        for layer in net:
            h = h.index_copy(0, alive, layer(h[alive]).tanh())
            alive = alive[: max(1, len(alive) - 1)]
        return score(h)

    return net, losses


@case(batches=(4, 1))
def depth_from_the_data(B: int) -> Program:
    net, x, depth = nn.Linear(3, 3), torch.randn(B, 3), [3, 1, 2, 0][:B]

    def losses() -> Tensor:
        rows = []
        for one, n in zip(x, depth, strict=True):
            for _ in range(n):
                one = net(one).tanh()
            rows.append(net(one))
        return score(torch.stack(rows))

    return net, losses


@case(batches=(4, 1))
def layer_drop_and_random_depth(B: int) -> Program:
    net, x, keep = (
        nn.ModuleList([nn.Linear(3, 3) for _ in range(3)]),
        torch.randn(B, 3),
        torch.rand(3, B, 1) < 0.6,
    )

    def losses() -> Tensor:
        h = x
        for layer, mask in zip(net, keep | (torch.arange(B) == 0)[:, None], strict=True):
            h = h + layer(h).tanh() * mask
        return score(h)

    return net, losses


@case(batches=(4, 1))
def loop_over_time_and_heads(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 2) for _ in range(3)]), torch.randn(B, 3, 3)
    return net, lambda: score(torch.stack([net[t](x[:, t]) for t in range(3)], 2).tanh())


@case(batches=(3, 1))
def fixed_point_iteration(B: int) -> Program:
    w, x = param(3, 3, scale=0.2), torch.randn(B, 3)

    def losses() -> Tensor:
        h, last = torch.zeros(B, 3), torch.full((), torch.inf)
        while last > 1e-6:
            new = torch.tanh(h @ w + x)
            last, h = (new - h).detach().abs().max(), new
        return score(h)

    return [w], losses


@case(batches=(3, 1))
def gradient_inside_the_losses(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1, bias=False)), torch.randn(B, 3)

    def losses() -> Tensor:
        point = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(point).sum(), point, create_graph=True)
        return (slope.norm(dim=1) - 1).square()

    return net, losses


@case(batches=(3, 1))
def inner_update(B: int) -> Program:
    """One step of gradient descent on a shared support set, then losses of the batch."""
    net, support, x = nn.Linear(3, 2), torch.randn(5, 3), torch.randn(B, 3)

    def losses() -> Tensor:
        inner = net(support).square().mean()
        slope = torch.autograd.grad(inner, net.weight, create_graph=True)[0]
        return score(F.linear(x, net.weight - 0.1 * slope, net.bias).tanh())

    return net, losses
