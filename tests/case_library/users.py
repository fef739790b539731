"""Losses per user: several records each, summed before the gradient is asked for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, ints, score


@case(batches=(3, 1, 5))
def losses_per_user(B: int) -> Program:
    """B users; several records each, in random order, and one user with none."""
    net, user = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), ints(max(B - 1, 1), 12)
    x = torch.randn(12, 3)

    def losses() -> Tensor:
        each = score(net(x))
        return each.new_zeros(B).index_add(0, user, each)

    return net, losses


@case({"sum": {"reduce": "sum"}, "mean": {"reduce": "mean"}}, batches=(3, 1))
def losses_per_user_scattered(B: int, reduce: str) -> Program:
    net, user, x = nn.Linear(3, 4), torch.arange(12) % B, torch.randn(12, 3)
    return net, lambda: torch.zeros(B).scatter_reduce(0, user, score(net(x)), reduce, include_self=False)


@case(batches=(3, 1))
def losses_per_user_over_tokens(B: int) -> Program:
    net, user = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6)), torch.arange(9) % B
    x = ints(6, 9, 5)

    def losses() -> Tensor:
        each = F.cross_entropy(net(x).mT, x, reduction="none").mean(1)
        return torch.zeros(B).index_add(0, user, each)

    return net, losses


@case(batches=(3, 1, 2))
def losses_per_user_by_matrix(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(6, 3)
    member = F.one_hot(torch.arange(6) % B, B).to(torch.get_default_dtype())
    return net, lambda: member.t() @ score(net(x))


@case(batches=(3, 1, 0))
def losses_per_user_by_view(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B * 4, 3)
    return net, lambda: score(net(x)).view(B, 4).sum(1)


@case(batches=(3, 20))
def losses_per_user_of_experts(B: int) -> Program:
    """Both the records and the tokens inside the model are moved by index."""
    net, user, x = (
        nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)]),
        torch.randint(B, (2 * B,)),
        torch.randn(2 * B, 3),
    )

    def losses() -> Tensor:
        side = (x[:, 0] > 0).long()
        out = torch.zeros(2 * B, 4)
        for e, layer in enumerate(net):
            row = (side == e).nonzero().squeeze(1)
            out = out.index_add(0, row, layer(x[row]).tanh())
        return torch.zeros(B).index_add(0, user, score(out))

    return net, losses
