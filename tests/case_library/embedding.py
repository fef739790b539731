"""Embedding tables and bags."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Program, case, ints, param, score


@case(
    {
        "ids": {"ids": ()},
        "sequences": {"ids": (5,)},
        "grids": {"ids": (2, 3)},
        "padding-idx": {"ids": (5,), "padding_idx": 1},
        "padding-idx-zero": {"ids": (5,), "padding_idx": 0},
        "padding-idx-negative": {"ids": (5,), "padding_idx": -1},
        "sparse": {"ids": (5,), "sparse": True},
        "sparse-padding": {"ids": (5,), "sparse": True, "padding_idx": 2},
    },
    batches=(4, 1, 0, 3),
)
def embedding(B: int, ids: tuple[int, ...], **options: Any) -> Program:
    net, x = nn.Embedding(4, 3, **options), ints(4, B, *ids)
    return net, lambda: score(net(x).tanh())


@case({"": {}, "padding": {"padding_idx": 1}}, batches=(4, 1, 0, 3), interacts=True)
def embedding_by_frequency(B: int, **options: Any) -> Program:
    """Gradients are divided by how often the whole batch reads a row."""
    return embedding(B, ids=(5,), scale_grad_by_freq=True, **options)


@case(batches=(4, 8, 1, 0))
def embedding_vocabulary_divisible_by_batch(B: int) -> Program:
    net, x = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)), ints(8, B, 8)
    return net, lambda: F.cross_entropy(net(x).mT, x, reduction="none").mean(1)


@case()
def embedding_rows_never_read(B: int) -> Program:
    net, x = nn.Embedding(50, 3), ints(5, B, 4)
    return net, lambda: score(net(x))


@case()
def embedding_time_first(B: int) -> Program:
    net, x = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 2)), ints(6, 5, B)
    return net, lambda: score(net(x).transpose(0, 1))


@case()
def embedding_of_positions_once(B: int) -> Program:
    net = nn.ModuleDict({"tok": nn.Embedding(7, 4), "pos": nn.Embedding(5, 4), "out": nn.Linear(4, 3)})
    x, pos = ints(7, B, 5), torch.arange(5).unsqueeze(0)
    return net, lambda: score(net["out"]((net["tok"](x) + net["pos"](pos)).tanh()))


@case()
def embedding_of_positions_unbatched(B: int) -> Program:
    net, x = nn.Embedding(5, 4), torch.randn(B, 5, 4)
    return net, lambda: score((x + net(torch.arange(5))).tanh())


@case()
def embedding_of_positions_expanded(B: int) -> Program:
    net, x = nn.Embedding(5, 4), torch.randn(B, 5, 4)
    return net, lambda: score((x * net(torch.arange(5).expand(B, 5))).tanh())


@case()
def embedding_functional_of_computed_table(B: int) -> Program:
    table, x = param(6, 3), ints(6, B, 4)
    return [table], lambda: score(F.embedding(x, table.tanh() * 2))


@case()
def embedding_same_table_three_uses(B: int) -> Program:
    net = nn.Embedding(7, 4)
    words, types, pos = ints(7, B, 5), ints(7, B, 1), torch.arange(5)
    return net, lambda: score((net(words) + net(types) + net(pos)).sin())


@case({mode: {"mode": mode} for mode in ("sum", "mean", "max")}, nodes=("EmbeddingBagBackward0",))
def embedding_bag(B: int, mode: str) -> Program:
    net, x = nn.EmbeddingBag(5, 3, mode=mode), ints(5, B, 6)
    return net, lambda: score(net(x).tanh())


@case({mode: {"mode": mode} for mode in ("sum", "mean", "max")}, batches=(4, 1))
def embedding_bag_offsets(B: int, mode: str) -> Program:
    sizes = torch.tensor([3, 0, 5, 2])[:B]
    net, x = nn.EmbeddingBag(5, 3, mode=mode), ints(5, int(sizes.sum()))
    return net, lambda: score(net(x, sizes.cumsum(0) - sizes).tanh())


@case({mode: {"mode": mode} for mode in ("sum", "mean", "max")})
def embedding_bag_duplicates(B: int, mode: str) -> Program:
    net, x = nn.EmbeddingBag(3, 4, mode=mode), torch.tensor([0, 1, 1, 0, 1]).expand(B, 5).contiguous()
    scale = torch.randn(B, 1)
    return net, lambda: score(net(x) * scale)


@case({mode: {"mode": mode} for mode in ("sum", "mean", "max")})
def embedding_bag_padding(B: int, mode: str) -> Program:
    net, x = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=2), ints(5, B, 6)
    return net, lambda: score(net(x))


@case()
def embedding_bag_per_sample_weights(B: int) -> Program:
    net, x, w = nn.EmbeddingBag(5, 3, mode="sum"), ints(5, B, 6), torch.randn(B, 6)
    return net, lambda: score(net(x, per_sample_weights=w))


@case()
def embedding_bag_learned_weights(B: int) -> Program:
    net = nn.ModuleDict({"bag": nn.EmbeddingBag(5, 3, mode="sum"), "gate": nn.Embedding(5, 1)})
    x = ints(5, B, 6)
    return net, lambda: score(net["bag"](x, per_sample_weights=net["gate"](x).squeeze(-1).sigmoid()))


@case()
def embedding_bag_shared_position_weights(B: int) -> Program:
    net, w, x = nn.EmbeddingBag(5, 3, mode="sum"), param(6), ints(5, B, 6)
    return {"table": net.weight, "w": w}, lambda: score(net(x, per_sample_weights=w.expand(B, 6).contiguous()))


@case({mode: {"mode": mode} for mode in ("sum", "mean")})
def embedding_bag_sparse(B: int, mode: str) -> Program:
    net, x = nn.EmbeddingBag(5, 3, mode=mode, sparse=True), ints(5, B, 6)
    return net, lambda: score(net(x))


@case(batches=(4, 1))
def embedding_bag_last_offset(B: int) -> Program:
    offsets = torch.tensor([0, 2, 2, 5, 7])[: B + 1]
    net, x = nn.EmbeddingBag(5, 3, mode="mean", include_last_offset=True), ints(5, int(offsets[-1]))
    return net, lambda: score(net(x, offsets))


@case()
def embedding_bag_several_per_sample(B: int) -> Program:
    net, x = nn.EmbeddingBag(5, 3, mode="mean"), ints(5, B, 4, 3)
    return net, lambda: score(net(x.flatten(0, 1)).unflatten(0, (B, 4)).tanh())


@case(dtype=torch.float32, rtol=1e-4)
def embedding_bag_float32(B: int) -> Program:
    net = nn.Sequential(nn.EmbeddingBag(5, 4), nn.ReLU(), nn.Linear(4, 3))
    x = ints(5, B, 6)
    return net, lambda: score(net(x))


@case()
def recommender_towers(B: int) -> Program:
    net = nn.ModuleDict({"user": nn.Embedding(6, 4), "item": nn.Embedding(9, 4), "bias": nn.Embedding(9, 1)})
    u, i, rating = ints(6, B), ints(9, B), torch.randn(B)
    return net, lambda: ((net["user"](u) * net["item"](i)).sum(1) + net["bias"](i).squeeze(1) - rating) ** 2


@case()
def negative_sampling(B: int) -> Program:
    table, context = nn.Embedding(9, 4), nn.Embedding(9, 4)
    center, positive, negative = ints(9, B), ints(9, B), ints(9, B, 5)

    def losses() -> torch.Tensor:
        h = table(center)
        scores = torch.einsum("bkd,bd->bk", context(negative), h)
        return -F.logsigmoid((context(positive) * h).sum(1)) - F.logsigmoid(-scores).sum(1)

    return nn.ModuleList([table, context]), losses


@case()
def table_read_by_index(B: int) -> Program:
    table, x = param(6, 3), ints(6, B, 4)
    return [table], lambda: score(table[x].tanh())


@case()
def table_read_by_one_hot(B: int) -> Program:
    table, x = param(6, 3), ints(6, B, 4)
    return [table], lambda: score((F.one_hot(x, 6).to(table.dtype) @ table).tanh())


@case()
def table_read_by_index_select(B: int) -> Program:
    table, x = param(6, 3), ints(6, B)
    return [table], lambda: score(table.index_select(0, x).tanh())
