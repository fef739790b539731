"""Attention and transformers: built-in modules, scaled dot products, tokens, position biases, windows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, ints, param, score, shaken


@case({"batch-first": {"batch_first": True}, "time-first": {}, "no-bias": {"batch_first": True, "bias": False}})
def multihead(B: int, **options: bool) -> Program:
    net = shaken(nn.MultiheadAttention(4, 2, **options))
    x = torch.randn(B, 5, 4) if net.batch_first else torch.randn(5, B, 4)

    def losses() -> Tensor:
        out = net(x, x, x, need_weights=False)[0]
        return score(out if net.batch_first else out.transpose(0, 1))

    return net, losses


@case(batches=(4, 1))
def multihead_weights(B: int) -> Program:
    net, x = shaken(nn.MultiheadAttention(4, 2, batch_first=True)), torch.randn(B, 5, 4)

    def losses() -> Tensor:
        out, weights = net(x, x, x)
        return score(out) + score(weights)

    return net, losses


@case(batches=(4, 1))
def multihead_cross_dims_and_bias_tokens(B: int) -> Program:
    net = shaken(nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True, add_zero_attn=True))
    q, k, v = torch.randn(3, B, 4), torch.randn(6, B, 3), torch.randn(6, B, 5)
    return net, lambda: score(net(q, k, v)[0].transpose(0, 1))


@case(batches=(4, 1))
def multihead_padding_mask(B: int) -> Program:
    net, x = shaken(nn.MultiheadAttention(4, 2, batch_first=True)), torch.randn(B, 5, 4)
    mask = torch.arange(5) >= torch.tensor([5, 3, 1, 4])[:B, None]
    return net, lambda: score(net(x, x, x, key_padding_mask=mask, need_weights=False)[0])


@case({"post-norm": {}, "pre-norm": {"norm_first": True}, "time-first": {"batch_first": False}})
def encoder_layer(B: int, **options: bool) -> Program:
    net = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, **{"batch_first": True, **options})
    x = torch.randn(B, 5, 4) if net.self_attn.batch_first else torch.randn(5, B, 4)
    dim = 0 if net.self_attn.batch_first else 1
    return shaken(net), lambda: score(net(x).movedim(dim, 0))


@case(batches=(4, 1))
def encoder_stack_causal_with_dropout(B: int) -> Program:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.2, batch_first=True)
    net = shaken(nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4), enable_nested_tensor=False))
    x, mask = torch.randn(B, 5, 4), nn.Transformer.generate_square_subsequent_mask(5)
    return net, lambda: score(net(x, mask=mask, is_causal=True))


@case(batches=(4, 1))
def encoder_decoder(B: int) -> Program:
    net = shaken(nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True))
    x, y = torch.randn(B, 5, 4), torch.randn(B, 3, 4)
    return net, lambda: score(net(x, y, tgt_mask=nn.Transformer.generate_square_subsequent_mask(3)))


@case({"plain": {}, "causal": {"is_causal": True}, "scaled": {"scale": 0.3}})
def dot_product(B: int, **options: float) -> Program:
    net, x = nn.Linear(4, 12), torch.randn(B, 5, 4)

    def losses() -> Tensor:
        q, k, v = net(x).view(B, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)
        return score(F.scaled_dot_product_attention(q, k, v, **options))

    return net, losses


@case({"own-mask": {"shape": (1, 5, 5)}, "shared-mask": {"shape": ()}})
def dot_product_masked(B: int, shape: tuple[int, ...]) -> Program:
    net, x = nn.Linear(4, 12), torch.randn(B, 5, 4)
    mask = (torch.rand(B, *shape) if shape else torch.rand(5, 5)) < 0.6
    mask = mask | torch.eye(5, dtype=torch.bool)

    def losses() -> Tensor:
        q, k, v = net(x).view(B, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)
        return score(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    return net, losses


@case(dtype=torch.float32, rtol=1e-4, batches=(4, 1))
def dot_product_float32(B: int) -> Program:
    net, x = nn.Linear(8, 24), torch.randn(B, 5, 8)

    def losses() -> Tensor:
        q, k, v = net(x).view(B, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return score(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    return net, losses


@case()
def dot_product_learned_bias(B: int) -> Program:
    net, bias, x = nn.Linear(4, 12), param(2, 5, 5), torch.randn(B, 5, 4)

    def losses() -> Tensor:
        q, k, v = net(x).view(B, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)
        return score(F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(B, 2, 5, 5)))

    return {"bias": bias, **dict(net.named_parameters())}, losses


@case()
def grouped_queries(B: int) -> Program:
    q, kv, x = nn.Linear(4, 8), nn.Linear(4, 8), torch.randn(B, 3, 4)

    def losses() -> Tensor:
        query = q(x).view(B, 3, 4, 2).transpose(1, 2)
        key, value = kv(x).view(B, 3, 2, 2, 2).permute(2, 0, 3, 1, 4)
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        return score(F.scaled_dot_product_attention(query, key, value))

    return nn.ModuleList([q, kv]), losses


@case()
def learned_queries(B: int) -> Program:
    query, net, x = param(3, 4), nn.Linear(4, 8), torch.randn(B, 5, 4)

    def losses() -> Tensor:
        key, value = net(x).chunk(2, 2)
        return score((query @ key.mT / 2).softmax(2) @ value)

    return {"query": query, **dict(net.named_parameters())}, losses


@case()
def vision_transformer(B: int) -> Program:
    net = nn.ModuleDict(
        {
            "patch": nn.Conv2d(3, 4, 2, stride=2),
            "layer": nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, norm_first=True),
            "head": nn.Linear(4, 3),
        }
    )
    net.register_parameter("cls", param(1, 1, 4))
    net.register_parameter("pos", param(1, 10, 4))
    x, y = torch.randn(B, 3, 6, 6), ints(3, B)

    def losses() -> Tensor:
        h = net["patch"](x).flatten(2).transpose(1, 2)
        h = torch.cat([net.cls.expand(B, -1, -1), h], 1) + net.pos
        return F.cross_entropy(net["head"](net["layer"](h)[:, 0]), y, reduction="none")

    return net, losses


@case()
def gpt(B: int) -> Program:
    tok, pos, norm = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.LayerNorm(4)
    qkv, out, up, down = nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4)
    x = ints(7, B, 5)
    keep = torch.ones(5, 5, dtype=torch.bool).tril()

    def losses() -> Tensor:
        h = tok(x) + pos(torch.arange(5))
        q, k, v = qkv(norm(h)).view(B, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / 2).masked_fill(~keep, float("-inf")).softmax(-1)
        h = h + out((weights @ v).transpose(1, 2).reshape(B, 5, 4))
        h = h + down(F.gelu(up(norm(h))))
        logits = norm(h) @ tok.weight.t()
        return F.cross_entropy(logits[:, :-1].mT, x[:, 1:], reduction="none").mean(1)

    return shaken(nn.ModuleList([tok, pos, norm, qkv, out, up, down])), losses


@case()
def relative_position_bias(B: int) -> Program:
    table, net, x = param(9, 2), nn.Linear(4, 12), torch.randn(B, 5, 4)
    index = torch.arange(5)[:, None] - torch.arange(5)[None] + 4

    def losses() -> Tensor:
        q, k, v = net(x).view(B, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)
        bias = table[index.flatten()].view(5, 5, 2).permute(2, 0, 1)
        return score(((q @ k.mT) + bias).softmax(-1) @ v)

    return {"table": table, **dict(net.named_parameters())}, losses


@case()
def relative_position_embedding_bucketed(B: int) -> Program:
    table, net, x = nn.Embedding(3, 2), nn.Linear(4, 12), torch.randn(B, 5, 4)
    bucket = (torch.arange(5)[:, None] - torch.arange(5)[None]).abs().clamp(max=2)

    def losses() -> Tensor:
        q, k, v = net(x).view(B, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)
        return score((q @ k.mT + table(bucket).permute(2, 0, 1)[None]).softmax(-1) @ v)

    return nn.ModuleList([table, net]), losses


@case()
def rotary(B: int) -> Program:
    net, x = nn.Linear(4, 12), torch.randn(B, 5, 4)
    angle = torch.arange(5)[:, None] * torch.tensor([1.0, 0.1])
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def turn(h: Tensor) -> Tensor:
        left, right = h.chunk(2, -1)
        return h * cos + torch.cat([-right, left], -1) * sin

    def losses() -> Tensor:
        q, k, v = net(x).chunk(3, -1)
        return score((turn(q) @ turn(k).mT).softmax(-1) @ v)

    return net, losses


@case({"plain": {"shift": 0}, "shifted": {"shift": 1}})
def windows(B: int, shift: int) -> Program:
    """Swin: (B, 4, 4, C) is cut into four windows of 2 x 2 that join the batch dim."""
    net, table, x = nn.Linear(3, 9), param(4, 4), torch.randn(B, 4, 4, 3)

    def losses() -> Tensor:
        h = torch.roll(x, (-shift, -shift), (1, 2)).view(B, 2, 2, 2, 2, 3).transpose(2, 3).reshape(B * 4, 4, 3)
        q, k, v = net(h).chunk(3, -1)
        h = (q @ k.mT + table).softmax(-1) @ v
        h = h.view(B, 2, 2, 2, 2, 3).transpose(2, 3).reshape(B, 4, 4, 3)
        return score(torch.roll(h, (shift, shift), (1, 2)))

    return {"table": table, **dict(net.named_parameters())}, losses


@case()
def windows_with_masks(B: int) -> Program:
    net, x = nn.Linear(3, 9), torch.randn(B, 4, 4, 3)
    mask = torch.randn(4, 4, 4)

    def losses() -> Tensor:
        h = x.view(B, 2, 2, 2, 2, 3).transpose(2, 3).reshape(B * 4, 4, 3)
        q, k, v = net(h).chunk(3, -1)
        a = ((q @ k.mT).view(B, 4, 4, 4) + mask).view(B * 4, 4, 4).softmax(-1)
        return score((a @ v).view(B, -1, 3) if B else (a @ v).view(0, 16, 3))

    return net, losses


@case()
def axial_attention(B: int) -> Program:
    net, x = shaken(nn.MultiheadAttention(4, 2, batch_first=True)), torch.randn(B, 3, 4, 4)

    def losses() -> Tensor:
        rows = x.reshape(B * 3, 4, 4)
        h = net(rows, rows, rows, need_weights=False)[0].view(B, 3, 4, 4).transpose(1, 2).reshape(B * 4, 3, 4)
        return score(net(h, h, h, need_weights=False)[0].view(B, 4, 3, 4))

    return net, losses


@case(batches=(4, 1, 5))
def as_many_tokens_as_samples(B: int) -> Program:
    net, x = shaken(nn.MultiheadAttention(4, 2)), torch.randn(B, B, 4)
    return net, lambda: score(net(x, x, x, need_weights=False)[0].transpose(0, 1))


@case()
def linear_attention(B: int) -> Program:
    net, x = nn.Linear(4, 12), torch.randn(B, 5, 4)

    def losses() -> Tensor:
        q, k, v = net(x).chunk(3, -1)
        state = torch.einsum("btd,bte->btde", F.elu(k) + 1, v).cumsum(1)
        return score(torch.einsum("btd,btde->bte", F.elu(q) + 1, state))

    return net, losses
