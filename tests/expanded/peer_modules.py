"""The modules that programs for PyTorch's call_for_per_sample_grads and for ours are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.expanded.helpers import Run, squares


class Own(torch.autograd.Function):
    """x wᵀ, of which nobody knows more than that it can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


def frozen(module: nn.Module, *names: str) -> nn.Module:
    """The module, with these parameters frozen."""
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def away_from_zero(out: Tensor) -> Tensor:
    """Losses whose cotangents are not zero where the output is, as at a padding row."""
    return squares(out + 1)


def body(rnn: nn.Module) -> nn.Module:
    """The outputs of a recurrent layer, without its last state."""
    return Run(lambda m, x: m.rnn(x)[0], rnn=rnn)


def turned(layer: nn.Module) -> nn.Module:
    """The samples come first to the module, which turns them around its layer."""
    return Run(lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1), layer=layer)


def positions(T: int) -> nn.Module:
    """Words and positions; the positions are embedded once for all samples."""
    places = torch.arange(T)[None]
    return Run(lambda m, x: m.words(x) + m.places(places), words=nn.Embedding(6, 3), places=nn.Embedding(T, 3))


def attention(**options: Any) -> nn.Module:
    """Attention of a sequence to itself, or to the one given."""
    layer = nn.MultiheadAttention(4, 2, **options)
    return Run(lambda m, q, k=None, v=None: m.layer(q, q if k is None else k, q if v is None else v)[0], layer=layer)


def heads(y: Tensor) -> Tensor:
    """(B, T, 4) as two heads (B, 2, T, 2)."""
    return y.unflatten(2, (2, 2)).transpose(1, 2)


def distances(T: int) -> Tensor:
    return (torch.arange(T)[:, None] - torch.arange(T)).clamp(-2, 2) + 2


def relative_gate() -> nn.Module:
    """A bias for every distance, repeated for all samples and folded into the heads; data open it or shut it."""

    def forward(m: Run, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        bias = m.e(distances(T)).permute(2, 0, 1).unsqueeze(0).repeat(B, 1, 1, 1).reshape(2 * B, T, T)
        gate = heads(m.q(x)).mean(3).sigmoid().reshape(2 * B, T, 1)
        return (gate * bias).reshape(B, 2, T, T)

    return Run(forward, q=nn.Linear(4, 4), e=nn.Embedding(5, 2))


def relative_keys() -> nn.Module:
    """A key for every distance."""

    def forward(m: Run, x: Tensor) -> Tensor:
        q, k, v = heads(m.q(x)), heads(m.k(x)), heads(m.v(x))
        bias = torch.einsum("bhld,lrd->bhlr", q, m.e(distances(x.shape[1])))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return Run(forward, q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4), e=nn.Embedding(5, 2))


def last(x: Any) -> Any:
    """A tensor or a module with the same numbers, and the channels last in memory."""
    return x.to(memory_format=torch.channels_last)


def scaled(m: Run, x: Tensor) -> Tensor:
    """A weight, and what is computed from it without a gradient."""
    with torch.no_grad():
        scale = 1 + m.w.t().norm()
    return x @ m.w / scale


def fold(m: Run, x: Tensor) -> Tensor:
    """Positions and samples in one dim."""
    return m.a(x.flatten(0, 1))


def fold_and_back(m: Run, x: Tensor) -> Tensor:
    return fold(m, x).unflatten(0, x.shape[:2])


def unfolded(out: Tensor) -> Tensor:
    """Losses (B,) of an output with five positions of each sample in dim 0."""
    return squares(out.unflatten(0, (len(out) // 5, 5)))


def unfolded_turned(out: Tensor) -> Tensor:
    """The same, with all samples of each position side by side."""
    return squares(out.unflatten(0, (5, len(out) // 5)), 1)


def then(layer: nn.Module, after: Callable[[Any], Tensor]) -> nn.Module:
    """A layer, and what is done to its result."""
    return Run(lambda m, x: after(m.layer(x)), layer=layer)


def turn(y: Tensor) -> Tensor:
    return y.transpose(0, 1)


def flat(y: Tensor) -> Tensor:
    return y.flatten(0, 1)


def turned_flat(y: Tensor) -> Tensor:
    return flat(turn(y))


def state(results: tuple[Tensor, Tensor]) -> Tensor:
    """A recurrent layer's last state (L, B, H), in a way that hides where it comes from."""
    return results[1].tanh()


def state_turned(results: tuple[Tensor, Tensor]) -> Tensor:
    return turn(results[1])


def raw(way: Callable[[Run, Tensor], Tensor]) -> nn.Module:
    """Parameters that are no layer's, used in some way; and a layer without any of its own, to be given some."""
    r = torch.randn
    return Run(way, w=r(3, 3), s=r(3), t=r(4, 3), gru=frozen(nn.GRU(3, 3, bias=False, batch_first=True), *RECURRENT))


RECURRENT = ("weight_ih_l0", "weight_hh_l0")


def with_token(m: Run, x: Tensor) -> Tensor:
    """One more position, the same for all samples."""
    return torch.cat([m.token.expand(len(x), 1, 3), m.a(x)], 1)


def penalised(m: Run, x: Tensor) -> Tensor:
    return m.a(x) + m.s.square().sum()


def tie(m: Run, x: Tensor) -> Tensor:
    """The embedding's weight is the head's, too."""
    return F.linear(m.e(x).tanh(), m.e.weight)


def routed(m: Run, x: Tensor) -> Tensor:
    """Every sample goes to one of two layers."""
    left = torch.arange(len(x)) % 3 == 0
    out = x.new_zeros(len(x), 2)
    out[left], out[~left] = m.a(x[left]), m.b(x[~left])
    return out


def recomputed(layer: nn.Module) -> nn.Module:
    """A layer whose activations are computed again in the backward."""
    return Run(lambda m, x: checkpoint(m.layer, x, use_reentrant=False), layer=layer)


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)
