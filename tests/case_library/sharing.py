"""One weight, several uses: tying, reuse, merged and reparametrised weights, constants beside the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .registry import Program, case, ints, param, score, shaken


@case()
def tied_embedding_and_head(B: int) -> Program:
    table, mid = nn.Embedding(7, 4), nn.Linear(4, 4)
    x = ints(7, B, 5)
    return nn.ModuleList([table, mid]), lambda: F.cross_entropy(
        F.linear(mid(table(x)).tanh(), table.weight).mT, x.roll(1, 1), reduction="none"
    ).mean(1)


@case()
def tied_modules(B: int) -> Program:
    net = nn.ModuleDict({"tok": nn.Embedding(7, 4, padding_idx=0), "head": nn.Linear(4, 7)})
    net["head"].weight = net["tok"].weight
    x = ints(7, B, 5)
    return net, lambda: score(net["head"](net["tok"](x).tanh()))


@case()
def tied_autoencoder(B: int) -> Program:
    w, b, c, x = param(3, 6), param(3), param(6), torch.randn(B, 6)
    return [w, b, c], lambda: (F.linear(F.linear(x, w, b).tanh(), w.t(), c) - x).square().sum(1)


@case()
def tied_through_sparse_embedding(B: int) -> Program:
    table, x = nn.Embedding(6, 4), ints(6, B, 3)
    return table, lambda: score(F.embedding(x, table.weight, sparse=True).tanh() @ table.weight.t())


@case()
def linear_applied_twice(B: int) -> Program:
    net, x = nn.Linear(4, 4), torch.randn(B, 4)
    return net, lambda: score(net(net(x).tanh()))


@case()
def linear_applied_at_two_ranks(B: int) -> Program:
    net, x, y = nn.Linear(4, 4), torch.randn(B, 4), torch.randn(B, 3, 4)
    return net, lambda: score(net(net(y).tanh().mean(1) + net(x)))


@case()
def norm_applied_twice(B: int) -> Program:
    net = shaken(nn.ModuleDict({"norm": nn.LayerNorm(4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}))
    x = torch.randn(B, 3, 4)
    return net, lambda: score(net["norm"](net["b"](net["norm"](net["a"](x)).relu())))


@case()
def group_norm_applied_twice(B: int) -> Program:
    net = shaken(nn.ModuleDict({"norm": nn.GroupNorm(2, 4), "conv": nn.Conv2d(4, 4, 3, padding=1)}))
    x = torch.randn(B, 4, 5, 5)
    return net, lambda: score(net["norm"](net["conv"](net["norm"](net["conv"](x)).relu())))


@case()
def convolution_applied_at_two_scales(B: int) -> Program:
    net, x = nn.Conv2d(3, 4, 3), torch.randn(B, 3, 8, 8)
    return net, lambda: score(net(x)) + score(net(F.avg_pool2d(x, 2)).tanh())


@case()
def shared_layers(B: int) -> Program:
    layer = shaken(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True))
    x = torch.randn(B, 3, 4)
    return layer, lambda: score(layer(layer(layer(x))))


@case()
def layer_of_batch_and_of_constant(B: int) -> Program:
    net, x, fixed = nn.Linear(4, 3), torch.randn(B, 4), torch.randn(4)
    return net, lambda: score((net(x) * net(fixed)).tanh())


@case()
def layer_of_batch_and_of_constant_rows(B: int) -> Program:
    net, x, prototypes = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(B, 4), torch.randn(5, 4)
    return net, lambda: score(net(x) @ net(prototypes).t())


@case(batches=(4, 3), interacts=True)
def layer_of_batch_and_of_a_constant_as_long(B: int) -> Program:
    """The graph is that of in-batch contrast: nothing in it says that the second B rows are constants."""
    net, x, prototypes = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(B, 4), torch.randn(B, 4)
    return net, lambda: score(net(x) @ net(prototypes).t())


@case()
def prototypes_by_distance(B: int) -> Program:
    net, x, support = (
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)),
        torch.randn(B, 4),
        torch.randn(10, 4),  # no multiple of B: then they might be the samples
    )
    y = ints(5, B)

    def losses() -> Tensor:
        centres = net(support).unflatten(0, (5, 2)).mean(1)
        distance = (net(x)[:, None] - centres).square().sum(2)
        return F.cross_entropy(-distance, y, reduction="none")

    return net, losses


@case()
def network_on_constants_only_scales(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(B, 3)
    fixed = torch.randn(2)
    return net, lambda: score((x * net(fixed)).sin())


@case()
def weight_used_by_module_and_functional(B: int) -> Program:
    net, x = nn.Linear(4, 4), torch.randn(B, 4)
    return net, lambda: score(F.linear(net(x).tanh(), net.weight))


@case()
def conv_weight_used_by_module_and_regulariser(B: int) -> Program:
    net, x, strength = nn.Conv1d(2, 3, 3), torch.randn(B, 2, 6), torch.rand(B)
    return net, lambda: score(net(x)) + strength * net.weight.square().sum()


@case()
def penalty_the_same_for_all(B: int) -> Program:
    net, x = nn.Linear(4, 3), torch.randn(B, 4)
    return net, lambda: score(net(x)) + 0.1 * sum(p.square().sum() for p in net.parameters())


@case()
def two_forwards_added(B: int) -> Program:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    x, y = torch.randn(B, 4), torch.randn(B, 4)
    return net, lambda: score(net(x)) + score(net(y).tanh())


@case(batches=(4, 2, 0))
def two_forwards_concatenated(B: int) -> Program:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    x, y = torch.randn(B // 2, 4), torch.randn(B - B // 2, 4)
    return net, lambda: torch.cat([score(net(x)), score(net(y).tanh())])


@case(zeros=("2.bias",))
def siamese(B: int) -> Program:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y, z = torch.randn(B, 4), torch.randn(B, 4), torch.randn(B, 4)
    return net, lambda: F.triplet_margin_loss(net(x), net(y), net(z), margin=3.0, reduction="none")


@case(zeros=("2.bias",))
def siamese_folded(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(2 * B, 4)

    def losses() -> Tensor:
        left, right = net(x).chunk(2)
        return (left - right).square().sum(1).sqrt()

    return net, losses


class Lora(nn.Module):
    """A frozen linear layer with a trained low-rank correction, added or merged."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.base = nn.Linear(4, 5).requires_grad_(False)
        self.a, self.b, self.merged = param(2, 4), param(5, 2), merged

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + 0.5 * self.b @ self.a, self.base.bias)
        return self.base(x) + 0.5 * (x @ self.a.t()) @ self.b.t()


@case({"added": {"merged": False}, "merged": {"merged": True}})
def lora(B: int, merged: bool) -> Program:
    net, x = (
        nn.Sequential(Lora(merged), nn.GELU(), nn.Linear(5, 3).requires_grad_(False)),
        torch.randn(B, 3, 4),
    )
    return net, lambda: score(net(x))


@case()
def lora_from_zero(B: int) -> Program:
    w, a, b, x = torch.randn(5, 4), param(2, 4), nn.Parameter(torch.zeros(5, 2)), torch.randn(B, 4)
    return [b], lambda: score(F.linear(x, w + b @ a.detach()))


@case()
def full_and_low_rank_together(B: int) -> Program:
    w, a, b, x = param(5, 4), param(2, 4), param(5, 2), torch.randn(B, 3, 4)
    return [w, a, b], lambda: score(F.linear(x, w + b @ a).tanh() @ w)


@case()
def weight_norm_linear(B: int) -> Program:
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(B, 4)
    return net, lambda: score(net(x))


@case()
def weight_norm_convolution(B: int) -> Program:
    net, x = parametrizations.weight_norm(nn.Conv1d(3, 4, 3, groups=1)), torch.randn(B, 3, 6)
    return net, lambda: score(net(x))


@case()
def weight_norm_by_hand(B: int) -> Program:
    v, g, x = param(5, 4), param(5, 1), torch.randn(B, 4)
    return [v, g], lambda: score(F.linear(x, g * v / v.norm(dim=1, keepdim=True)))


@case()
def spectral_norm_linear(B: int) -> Program:
    net, x = parametrizations.spectral_norm(nn.Linear(4, 5)).eval(), torch.randn(B, 4)
    return net, lambda: score(net(x))


@case()
def spectral_norm_convolution(B: int) -> Program:
    net, x = parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)).eval(), torch.randn(B, 3, 5, 5)
    return net, lambda: score(net(x))


@case()
def orthogonal_weight(B: int) -> Program:
    net, x = parametrizations.orthogonal(nn.Linear(5, 5)), torch.randn(B, 5)
    return net, lambda: score(net(x))


@case()
def standardised_weight(B: int) -> Program:
    w, x = param(4, 3, 3, 3), torch.randn(B, 3, 6, 6)
    return [w], lambda: score(F.conv2d(x, (w - w.mean((1, 2, 3), True)) / w.std((1, 2, 3), keepdim=True)))


@case()
def exponentiated_state_matrix(B: int) -> Program:
    log_a, x = param(4), torch.randn(B, 5, 4)
    return [log_a], lambda: score(x * torch.exp(-torch.exp(log_a)) ** torch.arange(5)[:, None])
