"""Non-reentrant checkpointing and saved-tensor hooks: what is saved is not there until asked for."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as _checkpoint
from torch.utils.checkpoint import checkpoint_sequential

from .registry import Program, case, ints, score, shaken

checkpoint = partial(_checkpoint, use_reentrant=False)


@case()
def checkpointed_mlp(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(B, 4)
    return net, lambda: score(checkpoint(net, x))


@case()
def checkpointed_blocks(B: int) -> Program:
    block = lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())  # noqa: E731
    net, x = shaken(nn.ModuleList([block() for _ in range(3)])), torch.randn(B, 3, 4)

    def losses() -> Tensor:
        h = x
        for layer in net:
            h = h + checkpoint(layer, h)
        return score(h)

    return net, losses


@case()
def checkpointed_same_block_twice(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(B, 4)
    return net, lambda: score(checkpoint(net, checkpoint(net, x)))


@case()
def checkpointed_nested(B: int) -> Program:
    inner, outer = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)
    x = torch.randn(B, 4)
    body = lambda h: outer(checkpoint(inner, h)).relu()  # noqa: E731
    return nn.ModuleList([inner, outer]), lambda: score(checkpoint(body, checkpoint(body, x)))


@case()
def checkpointed_three_deep(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), torch.randn(B, 4)
    deep = lambda h: net[2](h).tanh()  # noqa: E731
    middle = lambda h: checkpoint(deep, net[1](h).tanh())  # noqa: E731
    return net, lambda: score(checkpoint(lambda h: checkpoint(middle, net[0](h).tanh()), x))


@case()
def checkpointed_cnn(B: int) -> Program:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))
    x = torch.randn(B, 3, 7, 7)
    return shaken(net), lambda: score(checkpoint(net, x))


@case()
def checkpointed_transformer(B: int) -> Program:
    net, x = shaken(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)), torch.randn(B, 5, 4)
    return net, lambda: score(checkpoint(net, checkpoint(net, x)))


@case(batches=(4, 1))
def checkpointed_dropout(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)), torch.randn(B, 4)
    return net, lambda: score(checkpoint(net, x))


@case()
def checkpointed_embedding_and_head(B: int) -> Program:
    tok, head, x = nn.Embedding(6, 4), nn.Linear(4, 6), ints(6, B, 5)

    def losses() -> Tensor:
        h = checkpoint(lambda ids: tok(ids).tanh(), x)
        return checkpoint(lambda h: F.cross_entropy(head(h).mT, x, reduction="none").mean(1), h)

    return nn.ModuleList([tok, head]), losses


@case()
def checkpointed_with_several_outputs(B: int) -> Program:
    net, x = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]), torch.randn(B, 4)

    def losses() -> Tensor:
        a, b = checkpoint(lambda h: (net[0](h).tanh(), net[1](h).sigmoid()), x)
        return score(a * b)

    return net, losses


@case(batches=(4, 1))
def checkpointed_recurrence(B: int) -> Program:
    net, x = nn.GRU(3, 4, batch_first=True), torch.randn(B, 5, 3)
    return net, lambda: score(checkpoint(lambda h: net(h)[0], x))


@case(dtype=torch.float32, rtol=1e-4, batches=(4, 1))
def checkpointed_fused_lstm(B: int) -> Program:
    net, x = nn.LSTM(3, 4, num_layers=2, batch_first=True), torch.randn(B, 5, 3)
    return net, lambda: score(checkpoint(lambda h: net(h)[0], x))


@case()
def checkpointed_sequential(B: int) -> Program:
    net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(4, 4), nn.Tanh())])
    x = torch.randn(B, 4)
    return net, lambda: score(checkpoint_sequential(net, 3, x, use_reentrant=False))


@case()
def checkpointed_losses(B: int) -> Program:
    net, x = nn.Linear(4, 3), torch.randn(B, 4)
    return net, lambda: checkpoint(lambda h: score(net(h)), x)


@case(dtype=torch.float32, rtol=6e-2)
def checkpointed_autocast(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(B, 4)

    def losses() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return score(checkpoint(net, x).float())

    return net, losses


@case()
def saved_tensors_moved_away(B: int) -> Program:
    net, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Conv1d(1, 2, 3)), torch.randn(B, 1, 4)

    def losses() -> Tensor:
        with save_on_cpu():
            return score(net(x))

    return net, losses
