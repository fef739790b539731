"""Mixtures of experts: data-dependent routing in the forms that real models use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, param, score

E, D = 3, 4


class Experts(nn.Module):
    """A router and E two-layer experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(D, 6), nn.SiLU(), nn.Linear(6, D)) for _ in range(E)])


class Fused(nn.Module):
    """A router and E experts in two three-dimensional weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(D, E), param(E, D, 6), param(E, 6, D)
        self.up_bias, self.down_bias = param(E, 6), param(E, D)


def _tokens(B: int) -> Tensor:
    return torch.randn(B, 5, D)


@case(batches=(4, 1, 0, 7, 18))
def experts_index_add(B: int) -> Program:
    """Mixtral: each expert reads its tokens by index and adds its output back."""
    net, x = Experts(), _tokens(B)

    def losses() -> Tensor:
        flat = x.reshape(B * 5, D).tanh()
        weight, chosen = net.router(flat).softmax(-1).topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(net.experts):
            row, slot = torch.where(chosen == e)
            out.index_add_(0, row, expert(flat[row]) * weight[row, slot, None])
        return score(out.view(B, 5, D))

    return net, losses


@case(batches=(4, 1, 0))
def experts_after_and_before_layers(B: int) -> Program:
    net, a, b, x = Experts(), nn.Linear(D, D), nn.Linear(D, D), _tokens(B)

    def losses() -> Tensor:
        flat = a(x).reshape(B * 5, D)
        weight, chosen = net.router(flat).softmax(-1).topk(2, -1)
        out = flat.clone()
        for e, expert in enumerate(net.experts):
            slot, row = torch.where((F.one_hot(chosen, E).permute(2, 1, 0))[e])
            out = out.index_add(0, row, expert(flat[row]) * weight[row, slot, None])
        return score(b(out.view(B, 5, D)).tanh())

    return nn.ModuleList([net, a, b]), losses


@case(batches=(4, 1, 0))
def experts_boolean_mask(B: int) -> Program:
    """Switch: one expert a token, tokens read and written by a boolean mask."""
    net, x = Experts(), _tokens(B)

    def losses() -> Tensor:
        best, chosen = net.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(net.experts):
            out[chosen == e] = expert(x[chosen == e])
        return score(out * best[..., None])

    return net, losses


@case(batches=(4, 1, 0))
def experts_dispatch_einsum(B: int) -> Program:
    """Switch and GShard: a one-hot dispatch tensor, with dropped tokens, per sample groups."""
    net, x = Fused(), _tokens(B)

    def losses() -> Tensor:
        probs = net.router(x).softmax(-1)
        gate, chosen = probs.max(-1)
        mask = F.one_hot(chosen, E)
        place = (mask.cumsum(1) - 1) * mask
        kept = mask * (place < 2)
        dispatch = F.one_hot(place, 5)[..., :2] * kept[..., None]
        slots = torch.einsum("btec,btd->ebcd", dispatch.to(x), x)
        hidden = torch.einsum("ebcd,edh->ebch", slots, net.up) + net.up_bias[:, None, None]
        out = torch.einsum("ebch,ehd->ebcd", hidden.relu(), net.down) + net.down_bias[:, None, None]
        return score(torch.einsum("btec,ebcd->btd", dispatch * gate[..., None, None], out))

    return net, losses


@case(batches=(4, 1))
def experts_dispatch_over_the_batch(B: int) -> Program:
    """One-hot dispatch of all tokens at once: slots are filled across samples, by data."""
    net, x = Fused(), _tokens(B)

    def losses() -> Tensor:
        flat = x.reshape(B * 5, D).tanh()
        gate, chosen = net.router(flat).softmax(-1).max(-1)
        mask = F.one_hot(chosen, E)
        place = (mask.cumsum(0) - 1) * mask
        dispatch = F.one_hot(place, B * 5) * mask[..., None]
        slots = torch.einsum("tec,td->ecd", dispatch.to(flat), flat)
        hidden = torch.bmm(slots, net.up).relu()
        out = torch.bmm(hidden, net.down)
        return score((torch.einsum("tec,ecd->td", dispatch.to(flat), out) * gate[:, None]).view(B, 5, D))

    return {n: p for n, p in net.named_parameters() if "bias" not in n or "router" in n}, losses


@case(batches=(4, 1))
def experts_capacity_dropping(B: int) -> Program:
    """Tokens beyond an expert's capacity are dropped; the rest go through a padded buffer by index."""
    net, x = Fused(), _tokens(B)
    capacity = max(2, B)

    def losses() -> Tensor:
        flat = x.reshape(B * 5, D)
        gate, chosen = net.router(flat).softmax(-1).max(-1)
        place = (F.one_hot(chosen, E).cumsum(0) - 1).gather(1, chosen[:, None]).squeeze(1)
        row = (place < capacity).nonzero().squeeze(1)
        buffer = flat.new_zeros(E, capacity, D).index_put((chosen[row], place[row]), flat[row])
        out = torch.baddbmm(net.up_bias[:, None], buffer, net.up).relu() @ net.down
        back = out[chosen[row], place[row]] * gate[row, None]
        return score(flat.index_add(0, row, back).view(B, 5, D))

    return {n: p for n, p in net.named_parameters() if n != "down_bias"}, losses


@case(batches=(4, 1, 0))
def experts_sorted_groups(B: int) -> Program:
    """Tokens are sorted by expert, each group is one product, and the order is undone."""
    net, x = Fused(), _tokens(B)

    def losses() -> Tensor:
        flat = x.reshape(B * 5, D)
        gate, chosen = net.router(flat).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        sizes = chosen.flatten().bincount(minlength=E).tolist()
        groups = flat[order // 2].split(sizes)
        out = torch.cat(
            [F.silu(g @ u + b) @ d for g, u, b, d in zip(groups, net.up, net.up_bias, net.down, strict=True)]
        )
        back = torch.zeros_like(out).index_copy(0, order, out).view(B * 5, 2, D)
        return score((back * gate[..., None]).sum(1).view(B, 5, D))

    return {n: p for n, p in net.named_parameters() if n != "down_bias"}, losses


@case(batches=(4, 1, 0))
def experts_weights_gathered(B: int) -> Program:
    """The chosen experts' weights are gathered per token."""
    net, x = Fused(), _tokens(B)

    def losses() -> Tensor:
        gate, chosen = net.router(x).softmax(-1).topk(2, -1)
        hidden = torch.einsum("btd,btkdh->btkh", x, net.up[chosen]) + net.up_bias[chosen]
        out = torch.einsum("btkh,btkhd->btkd", F.gelu(hidden), net.down[chosen]) + net.down_bias[chosen]
        return score((out * gate[..., None]).sum(2))

    return net, losses


@case(batches=(4, 1, 0))
def experts_all_run(B: int) -> Program:
    """Every expert sees every token; the routing weights are scattered into a dense matrix."""
    net, x = Fused(), _tokens(B)

    def losses() -> Tensor:
        flat = x.reshape(B * 5, D)
        top, chosen = net.router(flat).topk(2, -1)
        weight = torch.zeros(B * 5, E).scatter(1, chosen, top.softmax(-1))
        hidden = torch.bmm(flat.expand(E, -1, -1), net.up) + net.up_bias[:, None]
        out = torch.bmm(F.silu(hidden), net.down) + net.down_bias[:, None]
        return score((out * weight.t()[..., None]).sum(0).view(B, 5, D))

    return net, losses


@case(batches=(4, 1, 0))
def experts_shared_and_routed(B: int) -> Program:
    """DeepSeek: sigmoid scores with a selection bias, a shared expert, scatter_add back."""
    net, shared, x = Experts(), nn.Linear(D, D), _tokens(B)
    bias = torch.tensor([0.1, -0.1, 0.0])

    def losses() -> Tensor:
        flat = x.reshape(B * 5, D)
        scores = net.router(flat).sigmoid()
        chosen = (scores + bias).topk(2, -1).indices
        weight = scores.gather(1, chosen)
        weight = weight / weight.sum(-1, keepdim=True)
        out = shared(flat)
        for e, expert in enumerate(net.experts):
            row, slot = torch.where(chosen == e)
            if len(row):
                part = expert(flat.index_select(0, row)) * weight[row, slot].unsqueeze(1)
                out = out.scatter_add(0, row[:, None].expand(-1, D), part)
        return score(out.view(B, 5, D))

    return nn.ModuleList([net, shared]), losses


@case(batches=(4, 6))
def experts_one_per_sample(B: int) -> Program:
    net, x, chosen = Experts(), torch.randn(B, D), torch.arange(B) % E

    def losses() -> Tensor:
        rows = torch.cat([(chosen == e).nonzero().squeeze(1) for e in range(E)])
        out = torch.cat([expert(x[chosen == e]) for e, expert in enumerate(net.experts)])
        return score(out[rows.argsort()] * net.router(x).softmax(-1).gather(1, chosen[:, None]))

    return net, losses


@case(batches=(4,), zeros=("experts.2.0.weight", "experts.2.0.bias", "experts.2.2.weight", "experts.2.2.bias"))
def experts_one_never_chosen(B: int) -> Program:
    net, x = Experts(), torch.randn(B, D)

    def losses() -> Tensor:
        chosen = net.router(x).topk(1, -1).indices.squeeze(1) % 2
        out = torch.zeros(B, D)
        for e, expert in enumerate(net.experts):
            row = (chosen == e).nonzero().squeeze(1)
            out = out.index_put((row,), expert(x[row]) * net.router(x[row]).softmax(-1)[:, :1])
        return score(out)

    return net, losses


@case(batches=(4, 3), interacts=True)
def experts_balance_loss(B: int) -> Program:
    """Each loss carries the load-balancing term of the whole batch."""
    net, x = Experts(), _tokens(B)

    def losses() -> Tensor:
        probs = net.router(x).softmax(-1)
        balance = (probs.mean((0, 1)) * F.one_hot(probs.argmax(-1), E).to(x).mean((0, 1))).sum()
        mixed = sum(probs[..., e, None] * expert(x) for e, expert in enumerate(net.experts))
        return score(mixed) + 0.1 * balance

    return net, losses


@case(batches=(4, 3), interacts=True)
def experts_choose_tokens(B: int) -> Program:
    """Expert choice: scores are normalised over all tokens of the batch."""
    net, x = Experts(), _tokens(B)

    def losses() -> Tensor:
        flat = x.reshape(B * 5, D)
        weight, row = net.router(flat).softmax(0).topk(2 * B, 0)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(net.experts):
            out = out.index_add(0, row[:, e], expert(flat[row[:, e]]) * weight[:, e, None])
        return score(out.view(B, 5, D))

    return net, losses


@case(batches=(4, 1))
def hash_routing_of_tokens(B: int) -> Program:
    table, net, ids = nn.Embedding(9, D), Fused(), torch.randint(9, (B, 5))

    def losses() -> Tensor:
        h = table(ids)
        out = torch.empty_like(h)
        for e in range(E):
            mask = ids % E == e
            out[mask] = F.silu(h[mask] @ net.up[e]) @ net.down[e]
        return score(out)

    return {"table": table.weight, "up": net.up, "down": net.down}, losses
