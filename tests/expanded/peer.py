"""What a program for PyTorch's call_for_per_sample_grads and for ours is, and the modules such programs are made of.

Nothing here says how either works: the definition is what both are measured with.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.reference import definition, named

OBSERVED = (2, 13)  # the torch on which the peer's behaviour was observed
WRONG = "gives a wrong result without an error"
FAILS = "raises"
AGREES = "is right"  # neighbours of what it gets wrong, which show where the line runs


def per_sample(out: Tensor) -> Tensor:
    """Losses (B,) of an output with the samples in dim 0."""
    return out.square().sum(tuple(range(1, out.ndim))) if out.ndim > 1 else out.square()


def time_first(out: Tensor) -> Tensor:
    """Losses (B,) of an output (T, B, ...)."""
    return per_sample(out.transpose(0, 1))


@dataclass
class Program:
    """A module, what it is called with, and losses (B,) made of its output."""

    module: nn.Module
    args: tuple[Any, ...]
    losses: Callable[[Any], Tensor] = per_sample
    options: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], Any] | None = None  # a context for the forward

    def forward(self, call: Callable[..., Any]) -> Tensor:
        """The losses, with `call` in the place of the module."""
        torch.manual_seed(0)
        if self.around is None:
            return self.losses(call(*self.args))
        with self.around():
            out = call(*self.args)
        return self.losses(out)

    def want(self) -> dict[str, Tensor]:
        """The definition, on the plain module and the batch as it was run."""
        return definition(self.forward(self.module), self.module)

    def got(self, call_for: Callable[..., Any], reduction: str = "sum") -> dict[str, Tensor]:
        """The grad_sample that `call_for` (the peer's or ours) leaves behind after the user's backward."""
        losses = self.forward(call_for(self.module, loss_reduction=reduction, **self.options))
        (losses.sum() if reduction == "sum" else losses.mean()).backward()
        return taken(self.module)


def taken(module: nn.Module) -> dict[str, Tensor]:
    """The stacks that parameters hold, which are removed; a trainable parameter without one is an error."""
    stacks = {}
    for name, p in named(module).items():
        assert getattr(p, "grad_sample", None) is not None, f"{name} has no grad_sample"
        assert p.grad is None, f"{name} has a grad"
        stacks[name] = p.grad_sample
        del p.grad_sample
    return stacks


@dataclass(frozen=True)
class Case:
    """One program and what the peer does with it."""

    name: str
    make: Callable[[int], Program]
    peer: str
    message: str  # part of the peer's error
    batches: tuple[int, ...]
    dtype: torch.dtype
    rtol: float
    slow: bool  # for ours: an op that no rule can know

    def build(self, B: int) -> Program:
        """The program at one batch size: same numbers every time."""
        with default_dtype(self.dtype):
            torch.manual_seed(zlib.crc32(self.name.encode()))
            return self.make(B)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors and modules are made in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CASES: list[Case] = []


def case(
    name: str,
    peer: str,
    message: str,
    make: Callable[[int], Program],
    *,
    batches: tuple[int, ...] = (4, 1, 0),
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-8,
    slow: bool = False,
) -> None:
    """Register a program; the peer is run at the first of `batches`, ours at each."""
    CASES.append(Case(name, make, peer, message, batches, dtype, rtol, slow))


class Run(nn.Module):
    """A forward written in place, over the modules and parameters it is given."""

    def __init__(self, body: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def on(module: nn.Module, *args: Any, losses: Callable[[Any], Tensor] = per_sample, around: Any = None) -> Program:
    """A module called with these arguments, the samples in dim 0."""
    return Program(module, args, losses, around=around)


def second(module: nn.Module, *args: Any) -> Program:
    """A module called with these arguments, the samples in dim 1."""
    return Program(module, args, time_first, {"batch_first": False})


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
    return per_sample(out + 1)


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


def mlp(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2), nn.Tanh(), nn.Linear(2, 2))


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
    return per_sample(out.unflatten(0, (len(out) // 5, 5)))


def unfolded_turned(out: Tensor) -> Tensor:
    """The same, with all samples of each position side by side."""
    return time_first(out.unflatten(0, (5, len(out) // 5)))


def ends_second(module: nn.Module, *args: Any) -> Program:
    """A module called with the samples in dim 0, which returns them in dim 1."""
    return Program(module, args, time_first)


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
