"""Where the samples lie: folded, last, shuffled, split, or beside dims of the same size."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, param, score


@case(batches=(4, 1, 0, 3))
def time_first_as_long_as_the_batch(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(B, B, 4)
    return net, lambda: score(net(x.transpose(0, 1)).transpose(0, 1))


@case(batches=(4, 1, 0, 3))
def batch_first_as_long_as_the_batch(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(B, B, 4)
    return net, lambda: score(net(x))


@case(batches=(4, 2))
def every_size_is_the_batch(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(B, B), nn.LayerNorm(B), nn.Tanh(), nn.Linear(B, B)), torch.randn(B, B, B)
    return net, lambda: score(net(x.transpose(0, 1)).transpose(0, 1).transpose(1, 2))


@case(batches=(4, 3))
def channels_as_many_as_samples(B: int) -> Program:
    net = nn.Sequential(nn.Conv2d(B, B, 3, padding=1), nn.GroupNorm(1, B), nn.ReLU(), nn.Conv2d(B, B, 3))
    x = torch.randn(B, B, 4, 4)
    return net, lambda: score(net(x))


@case(batches=(4, 3))
def channels_as_many_as_samples_swapped(B: int) -> Program:
    net, x = nn.Conv1d(B, B, 3, padding=1), torch.randn(B, B, 5)
    return net, lambda: score(net(net(x).tanh()))


@case(batches=(4, 5))
def hidden_as_wide_as_the_batch(B: int) -> Program:
    net, x = (
        nn.Sequential(nn.Linear(3, B), nn.ReLU(), nn.Linear(B, B), nn.ReLU(), nn.Linear(B, 2)),
        torch.randn(B, 3),
    )
    return net, lambda: score(net(x))


@case(batches=(4, 2))
def classes_as_many_as_samples(B: int) -> Program:
    net, x = nn.Linear(3, B), torch.randn(B, 3)
    return net, lambda: F.cross_entropy(net(x), torch.arange(B), reduction="none")


@case(batches=(4, 2))
def diagonal_of_scores_with_fixed_keys(B: int) -> Program:
    net, x, keys = nn.Linear(3, 5), torch.randn(B, 3), torch.randn(B, 5)
    return net, lambda: (net(x) @ keys.t()).log_softmax(1).diagonal()


@case(batches=(6, 1, 0))
def folded_time_first(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(3, B, 4)
    return net, lambda: score(net(x.reshape(3 * B, 4)).view(3, B, 3).transpose(0, 1))


@case(batches=(3, 1, 0))
def sample_in_the_middle_of_a_fold(B: int) -> Program:
    net, x = nn.Linear(4, 3), torch.randn(2, B, 5, 4)
    return net, lambda: score(net(x.reshape(-1, 4) if B else x.reshape(0, 4)).view(2, B, 5, 3).transpose(0, 1))


@case(batches=(3, 1, 0))
def sample_last_throughout(B: int) -> Program:
    w, v, b, x = param(5, 4), param(3, 5), param(5, 1), torch.randn(4, B)
    return [w, v, b], lambda: (v @ F.gelu(w @ x + b)).square().sum(0)


@case(batches=(3, 1, 0))
def sample_last_in_images(B: int) -> Program:
    net, x = nn.Conv2d(2, 3, 3), torch.randn(2, 5, 5, B)
    return net, lambda: net(x.permute(3, 0, 1, 2)).permute(1, 2, 3, 0).square().sum((0, 1, 2))


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "flipped": lambda h: h.flip(0),
    "rolled": lambda h: h.roll(1, 0),
    "halves-swapped": lambda h: torch.cat(h.chunk(2)[::-1]),
    "split": lambda h: torch.cat(h.split([1, h.shape[0] - 1])[::-1]),
    "strided": lambda h: torch.cat([h[1::2], h[::2]]),
    "interleaved": lambda h: h.view(2, -1, *h.shape[1:]).transpose(0, 1).flatten(0, 1),
    "indexed": lambda h: h[torch.tensor([2, 0, 3, 1])],
    "gathered": lambda h: h.gather(0, torch.tensor([2, 0, 3, 1])[:, None].expand_as(h)),
    "unbound": lambda h: torch.stack(h.unbind()[::-1]),
    "scattered": lambda h: torch.zeros_like(h).scatter(0, torch.tensor([2, 0, 3, 1])[:, None].expand_as(h), h),
    "index-copied": lambda h: torch.zeros_like(h).index_copy(0, torch.tensor([2, 0, 3, 1]), h),
    "permutation-matrix": lambda h: torch.eye(4)[torch.tensor([2, 0, 3, 1])] @ h,
}


@case({name: {"order": order} for name, order in ORDERS.items()}, batches=(4,))
def reordered(B: int, order: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3)
    return net, lambda: score(net[1](order(net[0](x).tanh())))


@case(batches=(17, 40, 260))
def reordered_large(B: int) -> Program:
    net, x, order = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3), torch.randperm(B)
    return net, lambda: score(net[1](net[0](x).tanh()[order]))


@case(batches=(4, 6, 1, 0))
def sorted_by_value(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3)

    def losses() -> Tensor:
        h = net[0](x).tanh()
        order = h[:, 0].detach().argsort(descending=True)
        return score(net[1](h[order]))[order.argsort()]

    return net, losses


@case(batches=(5, 1, 0))
def losses_in_another_order(B: int) -> Program:
    net, x, order = nn.Linear(3, 4), torch.randn(B, 3), torch.randperm(B)
    return net, lambda: score(net(x))[order]


@case(batches=(5, 1, 0), interacts=True)
def losses_sorted(B: int) -> Program:
    """Whose loss comes first depends on all."""
    net, x = nn.Linear(3, 4), torch.randn(B, 3)
    return net, lambda: score(net(x)).sort().values


@case(batches=(5, 3))
def losses_chosen_from_a_larger_batch(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B + 4, 3)
    return net, lambda: score(net(x))[torch.randperm(B + 4)[:B]]


@case(batches=(3, 2), interacts=True)
def hardest_of_the_batch(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B * 2, 3)
    return net, lambda: score(net(x)).topk(B).values


@case(batches=(3, 1, 0))
def rows_repeated(B: int) -> Program:
    net, x, y = nn.Linear(3, 4), torch.randn(B, 3), torch.randn(B, 5, 4)
    return net, lambda: score((net(x).repeat_interleave(5, 0).view(B, 5, 4) - y).tanh())


@case(batches=(3, 1, 0))
def rows_tiled(B: int) -> Program:
    net, head, x = nn.Linear(3, 4), nn.Linear(4, 2), torch.randn(B, 3)
    y = torch.randn(5 * B, 4)
    return nn.ModuleList([net, head]), lambda: score(
        head((net(x).repeat(5, 1) * y).tanh()).view(5, B, 2).transpose(0, 1)
    )


@case(batches=(4, 1))
def ragged_rows_per_sample(B: int) -> Program:
    net, head = nn.Linear(3, 4), nn.Linear(4, 1)
    sizes = torch.tensor([3, 1, 0, 5])[:B]
    owner = torch.arange(B).repeat_interleave(sizes)
    x = torch.randn(len(owner), 3)
    return nn.ModuleList([net, head]), lambda: torch.zeros(B).index_add(
        0, owner, head(net(x).relu()).squeeze(1).square()
    )


@case(batches=(3, 1, 0))
def losses_reduced_around_the_sample(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(2, B, 3)
    return net, lambda: net(x).square().sum((0, 2))


@case(batches=(6, 4, 0))
def sample_over_two_dims(B: int) -> Program:
    net, x = nn.Conv1d(3, 4, 2), torch.randn(2, B // 2, 3, 5)
    return net, lambda: score(net(x.flatten(0, 1)).unflatten(0, (2, B // 2)).flatten(0, 1))


@case(batches=(6, 4))
def sample_over_two_dims_not_adjacent(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(2, 5, B // 2, 3)
    return net, lambda: score(net(x).transpose(1, 2).reshape(B, 5, 4))


@case({"one-hot": {"dense": False}, "dense": {"dense": True}}, batches=(4, 3))
def mask_as_long_as_the_batch(B: int, dense: bool) -> Program:
    net, x, mask = nn.Linear(3, 4), torch.randn(B, B, 3), torch.rand(B, B) if dense else torch.eye(B)
    return net, lambda: score((net(x) * mask[:, :, None]).sum(1).tanh())


@case({"one-hot": {"dense": False}, "dense": {"dense": True}}, batches=(4, 3))
def mask_as_long_as_the_batch_time_first(B: int, dense: bool) -> Program:
    net, x, mask = nn.Linear(3, 4), torch.randn(B, B, 3), torch.rand(B, B) if dense else torch.eye(B)
    return net, lambda: score((net(x) * mask[:, :, None]).sum(0).tanh())


@case(batches=(4, 3), slow_path=True)
def one_hot_mask_picks_own_score(B: int) -> Program:
    net, x, y, mask = (
        nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)]),
        torch.randn(B, 3),
        torch.randn(B, 3),
        torch.eye(B),
    )
    return net, lambda: ((net[0](x).tanh() @ net[1](y).tanh().t()) * mask).sum(0).exp()


@case(batches=(4,))
def identity_mixing(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)]), torch.randn(B, 3)
    return net, lambda: score(net[1](torch.eye(B) @ net[0](x).tanh()))


@case(batches=(4, 2))
def diagonal_mixing_with_einsum(B: int) -> Program:
    net, x, scale = nn.Linear(3, 4), torch.randn(B, 3), torch.randn(B)
    return net, lambda: score(torch.einsum("ij,jd->id", torch.diag(scale), net(x).tanh()))


@case(batches=(4, 2, 1))
def padded_batch(B: int) -> Program:
    net, x = nn.Linear(3, 4), torch.randn(B, 3)
    return net, lambda: score(F.pad(net(x), (0, 0, 2, 1)).tanh())[2 : B + 2]


@case(batches=(4, 2, 1))
def batch_beside_constant_rows(B: int) -> Program:
    net, head, x, extra = nn.Linear(3, 4), nn.Linear(4, 2), torch.randn(B, 3), torch.randn(2, 4)
    return nn.ModuleList([net, head]), lambda: score(head(torch.cat([extra, net(x)]).tanh()))[2:]


@case(batches=(4, 3))
def batch_beside_learned_rows(B: int) -> Program:
    extra, head, x = param(2, 4), nn.Linear(4, 2), torch.randn(B - 2, 4)
    params = {"extra": extra, **dict(head.named_parameters())}
    return params, lambda: score(head(torch.cat([extra, x]).tanh()))


@case(batches=(4, 2))
def as_strided_windows(B: int) -> Program:
    net, x = nn.Linear(3, 6), torch.randn(B, 3)
    return net, lambda: score(net(x).unfold(1, 3, 1).prod(2))
