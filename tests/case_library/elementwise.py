"""Elementwise functions and activations between a layer and the losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Program, case, param, score

PLAIN_ACTIVATIONS = (
    F.relu, F.relu6, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.leaky_relu, F.hardtanh, F.hardswish,
    F.hardsigmoid, F.softplus, F.softsign, F.tanhshrink, F.softshrink, F.hardshrink, F.logsigmoid, F.rrelu,
    torch.tanh, torch.sigmoid,
)  # fmt: skip
PLAIN_FUNCTIONS = (
    torch.exp, torch.exp2, torch.expm1, torch.sin, torch.cos, torch.tan, torch.sinh, torch.cosh, torch.atan,
    torch.asinh, torch.erf, torch.erfc, torch.abs, torch.neg, torch.square, torch.sinc, torch.i0,
)  # fmt: skip
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {fn.__name__: fn for fn in PLAIN_ACTIVATIONS} | {
    "gelu-tanh": lambda h: F.gelu(h, approximate="tanh"),
    "threshold": lambda h: F.threshold(h, 0.1, 0.5),
    "glu": lambda h: F.glu(h, -1),
    "glu-middle": lambda h: F.glu(h, 1),
    "softmax": lambda h: h.softmax(-1),
    "softmax-middle": lambda h: h.softmax(1),
    "log_softmax": lambda h: h.log_softmax(-1),
    "softmin": lambda h: F.softmin(h, -1),
    "gumbel": lambda h: F.gumbel_softmax(h, hard=False),
    "normalize": lambda h: F.normalize(h, dim=-1),
    "dropout": lambda h: F.dropout(h, 0.4),
    "feature-dropout": lambda h: F.dropout1d(h, 0.5),
    "alpha-dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "rrelu-training": lambda h: F.rrelu(h, training=True),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {fn.__name__: fn for fn in PLAIN_FUNCTIONS} | {
    "log": lambda h: h.abs().add(0.1).log(),
    "log2": lambda h: h.abs().add(0.1).log2(),
    "log10": lambda h: h.abs().add(0.1).log10(),
    "log1p": lambda h: h.abs().log1p(),
    "sqrt": lambda h: h.abs().add(0.1).sqrt(),
    "rsqrt": lambda h: h.abs().add(0.1).rsqrt(),
    "reciprocal": lambda h: h.abs().add(0.1).reciprocal(),
    "lgamma": lambda h: h.abs().add(1.1).lgamma(),
    "digamma": lambda h: h.abs().add(1.1).digamma(),
    "asin": lambda h: h.tanh().mul(0.9).asin(),
    "acos": lambda h: h.tanh().mul(0.9).acos(),
    "atanh": lambda h: h.tanh().mul(0.9).atanh(),
    "acosh": lambda h: h.abs().add(1.1).acosh(),
    "erfinv": lambda h: h.tanh().mul(0.9).erfinv(),
    "logit": lambda h: h.sigmoid().logit(1e-6),
    "pow": lambda h: h.abs().add(0.1).pow(1.7),
    "cube": lambda h: h**3,
    "base": lambda h: 1.7**h,
    "clamp": lambda h: h.clamp(-0.5, 0.8),
    "clamp-by-tensor": lambda h: h.clamp(torch.full((4,), -0.3), torch.full((4,), 0.4)),
    "frac": lambda h: (h * 3).frac(),
    "fmod": lambda h: h.fmod(0.7),
    "remainder": lambda h: h.remainder(0.7),
    "round-passed": lambda h: h + (h.round() - h).detach(),
    "nan_to_num": lambda h: h.nan_to_num(),
    "heaviside-gated": lambda h: h * (h > 0),
    "float32-and-back": lambda h: h.float().double(),
    "clone-contiguous": lambda h: h.mT.contiguous().mT.clone(),
    "where": lambda h: torch.where(h > 0, h, h.exp() - 1),
    "where-number": lambda h: torch.where(h > 0, h, 0.1),
    "max-of-two": lambda h: torch.maximum(h, h.flip(-1)) + torch.fmin(h, h.flip(1)),
    "xlogy": lambda h: torch.xlogy(h, h.detach().abs() + 1) + torch.special.xlog1py(h, h.square()),
    "logaddexp": lambda h: torch.logaddexp(h, h.flip(-1)),
    "hypot": lambda h: torch.hypot(h, h.flip(-1) + 2),
    "atan2": lambda h: torch.atan2(h, h.flip(-1) + 3),
    "copysign": lambda h: torch.copysign(h, h.flip(-1).detach()),
    "ldexp": lambda h: torch.ldexp(h, torch.tensor(2)),
    "own-times-own": lambda h: h * h + h / (h.square() + 1) - h,
    "lerp": lambda h: torch.lerp(h, h.flip(-1), 0.3) + torch.lerp(h, h.sin(), h.sigmoid()),
    "addcmul": lambda h: torch.addcmul(h, h.sin(), h.cos(), value=0.5),
    "addcdiv": lambda h: torch.addcdiv(h, h.sin(), h.cosh()),
    "fake-quantised": lambda h: torch.fake_quantize_per_tensor_affine(h.float(), 0.1, 0, -12, 12).double(),
    "entropy": lambda h: torch.special.entr(h.sigmoid()),
    "polygamma": lambda h: torch.polygamma(1, h.abs() + 1),
    "bessel": lambda h: torch.special.i0e(h) + torch.special.i1(h),
}


@case({name: {"act": act} for name, act in ACTIVATIONS.items()})
def activation(B: int, act: Callable[[Tensor], Tensor]) -> Program:
    net, x = (
        nn.ModuleList([nn.Linear(5, 4), nn.Linear(2 if act is ACTIVATIONS["glu"] else 4, 3)]),
        torch.randn(B, 6, 5),
    )
    return net, lambda: score(net[1](act(net[0](x))))


@case({name: {"fn": fn} for name, fn in FUNCTIONS.items()})
def function(B: int, fn: Callable[[Tensor], Tensor]) -> Program:
    net, x = nn.Linear(5, 4), torch.randn(B, 3, 5)
    return net, lambda: score(fn(net(x)))


@case()
def snake_with_learned_frequency(B: int) -> Program:
    a, x = nn.Parameter(torch.rand(4, 1) + 0.5), torch.randn(B, 4, 6)
    return [a], lambda: score(x + (a * x).sin().square() / a)


@case()
def maxout(B: int) -> Program:
    net, x = nn.Linear(4, 6), torch.randn(B, 4)
    return net, lambda: score(net(x).view(B, 2, 3).amax(2))


@case()
def gated_unit_with_raw_weights(B: int) -> Program:
    u, v, w, x = param(4, 6), param(4, 6), param(6, 4), torch.randn(B, 5, 4)
    return [u, v, w], lambda: score((F.silu(x @ u) * (x @ v)) @ w)


@case()
def learned_quantisation_levels(B: int) -> Program:
    levels, net, x = param(5), nn.Linear(4, 3), torch.randn(B, 4)

    def losses() -> Tensor:
        h = net(x)
        nearest = (h.detach()[..., None] - levels.detach()).abs().argmin(-1)
        return (h - levels[nearest]).square().sum(1)

    return {"levels": levels, **dict(net.named_parameters())}, losses


@case()
def learned_spline(B: int) -> Program:
    knots, x = param(6), torch.rand(B, 3) * 4.99
    low = x.long()
    return [knots], lambda: score(torch.lerp(knots[low], knots[low + 1], x - low).sin())


@case()
def radial_basis(B: int) -> Program:
    centres, width, x = param(5, 3), nn.Parameter(torch.rand(5) + 0.5), torch.randn(B, 3)
    return [centres, width], lambda: score(torch.exp(-width * (x[:, None] - centres).square().sum(2)).cumsum(1))
