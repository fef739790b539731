"""Elementwise ops: parameters on either side, broadcast either way, scalars, complex numbers, losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .leaves import Sample, Samples, c, f, mask, p, w, z


def unary(fn: Callable[[Tensor], Tensor], *, make: Sequence[Callable[..., Tensor]] = (p,)) -> list[Sample]:
    """A matrix and a number, of every kind of parameter given."""
    return [lambda m=m, s=s: fn(m(*s)) for m in make for s in ((2, 3), ())]


def binary(fn: Callable[[Tensor, Tensor], Tensor], *, make: Sequence[Callable[..., Tensor]] = (p,)) -> list[Sample]:
    """Both operands broadcast; one of them a constant; a number and a matrix."""
    found: list[Sample] = []
    for m in make:
        found += [lambda m=m, a=a, b=b: fn(m(*a), m(*b)) for a, b in (((2, 3), (3,)), ((3,), (2, 1)), ((), (2, 3)))]
        found.append(lambda m=m: fn(m(3), m(2, 3).detach()))
        found.append(lambda m=m: fn(m(2, 3).detach(), m(2, 1)))
        found += [lambda m=m, b=b: fn(m(4, 4), m(*b)) for b in ((4,), (4, 1), (4, 1, 4))]  # sizes that coincide
    return found


BOTH = (w, z)  # real and complex

_UNARY: Samples = {
    "Abs": unary(torch.abs, make=BOTH),
    "Acos": unary(torch.acos, make=(p, z)),
    "Acosh": unary(lambda x: torch.acosh(x + 1)),
    "Alias": unary(torch.ops.aten.alias, make=BOTH),
    "Angle": unary(torch.angle, make=BOTH),
    "Asin": unary(torch.asin, make=(p, z)),
    "Asinh": unary(torch.asinh, make=BOTH),
    "Atan": unary(torch.atan, make=BOTH),
    "Atanh": unary(torch.atanh, make=(p, z)),
    "Ceil": unary(torch.ceil),
    "Celu": unary(lambda x: F.celu(x, 0.7), make=(w,)),
    "Clone": unary(torch.clone, make=BOTH),
    "Conj": unary(torch.conj, make=(z,)),
    "Cos": unary(torch.cos, make=BOTH),
    "Cosh": unary(torch.cosh, make=BOTH),
    "Deg2Rad": unary(torch.deg2rad),
    "Digamma": unary(torch.digamma),
    "Elu": [*unary(F.elu, make=(w,)), lambda: F.elu(w(2, 3), 0.5), lambda: F.selu(w(3))],
    "Erf": unary(torch.erf),
    "Erfc": unary(torch.erfc),
    "Erfinv": unary(torch.erfinv),
    "Exp": unary(torch.exp, make=BOTH),
    "Exp2": unary(torch.exp2, make=BOTH),
    "Expm1": unary(torch.expm1, make=BOTH),
    "Floor": unary(torch.floor),
    "Frac": unary(torch.frac),
    "Gelu": [*unary(F.gelu, make=(w,)), lambda: F.gelu(w(2, 3), approximate="tanh")],
    "Hardshrink": unary(F.hardshrink, make=(w,)),
    "Hardsigmoid": unary(F.hardsigmoid, make=(w,)),
    "Hardswish": unary(F.hardswish, make=(w,)),
    "Hardtanh": [*unary(F.hardtanh, make=(w,)), lambda: F.relu6(w(2, 3))],
    "I0": unary(torch.special.i0),
    "LeakyRelu": [*unary(F.leaky_relu, make=(w,)), lambda: F.leaky_relu(w(2, 3), 0.3)],
    "Lgamma": unary(torch.lgamma),
    "Log": unary(torch.log, make=(p, z)),
    "Log10": unary(torch.log10, make=(p, z)),
    "Log1P": unary(torch.log1p, make=(p, z)),
    "Log2": unary(torch.log2, make=(p, z)),
    "LogSigmoid": unary(F.logsigmoid, make=(w,)),
    "Logit": [*unary(torch.logit), lambda: torch.logit(p(2, 3), 0.3)],
    "NanToNum": unary(lambda x: torch.nan_to_num(x * torch.tensor([1.0, float("nan"), 2.0], dtype=x.dtype))),
    "Neg": unary(torch.neg, make=BOTH),
    "Polygamma": unary(lambda x: torch.polygamma(1, x)),
    "Rad2Deg": unary(torch.rad2deg),
    "Reciprocal": unary(torch.reciprocal, make=BOTH),
    "Relu": unary(F.relu, make=(w,)),
    "Round": [*unary(torch.round), lambda: torch.round(p(3), decimals=1)],
    "Rsqrt": unary(torch.rsqrt, make=(p, z)),
    "Sgn": unary(torch.sgn, make=BOTH),
    "Sigmoid": unary(torch.sigmoid, make=BOTH),
    "Sign": unary(torch.sign),
    "Silu": unary(F.silu, make=(w,)),
    "Sin": unary(torch.sin, make=BOTH),
    "Sinc": [*unary(torch.sinc, make=BOTH), lambda: torch.sinc(torch.zeros(3).requires_grad_())],
    "Sinh": unary(torch.sinh, make=BOTH),
    "Softplus": [*unary(F.softplus, make=(w,)), lambda: F.softplus(w(2, 3), 2.0, 0.5)],
    "Softshrink": unary(lambda x: F.softshrink(x, 0.3), make=(w,)),
    "SpecialEntr": unary(torch.special.entr),
    "SpecialErfcx": unary(torch.special.erfcx),
    "SpecialI0E": unary(torch.special.i0e),
    "SpecialI1": unary(torch.special.i1),
    "SpecialI1E": unary(torch.special.i1e),
    "SpecialLogNdtr": unary(torch.special.log_ndtr),
    "SpecialNdtri": unary(torch.special.ndtri),
    "Sqrt": unary(torch.sqrt, make=(p, z)),
    "Tan": unary(torch.tan, make=BOTH),
    "Tanh": unary(torch.tanh, make=BOTH),
    "Threshold": unary(lambda x: F.threshold(x, 0.2, 5.0), make=(w,)),
    "ToCopy": [
        lambda: w(2, 3).float(),
        lambda: f(2, 3).double(),
        lambda: w(3).to(torch.bfloat16),
        lambda: w(2, 3).to(torch.complex128),
        lambda: f(2, 3).to(torch.complex64),
    ],
    "Trunc": unary(torch.trunc),
}

_BINARY: Samples = {
    "Add": [
        *binary(torch.add, make=BOTH),
        *binary(lambda a, b: torch.add(a, b, alpha=2.5)),
        lambda: w(2, 3) + 1.5,
        lambda: w(2, 3) + z(3),
        lambda: f(2, 3) + w(3),
    ],
    "Atan2": binary(torch.atan2),
    "Copysign": [*binary(torch.copysign, make=(w,)), lambda: torch.copysign(w(2, 3), -1.0)],
    "Div": [
        *binary(torch.div, make=(p, z)),
        *binary(lambda a, b: torch.div(a, b, rounding_mode="floor")),
        *binary(lambda a, b: torch.div(a, b, rounding_mode="trunc")),
        lambda: w(2, 3) / 3,
        lambda: torch.div(w(2, 3), 0.3, rounding_mode="floor"),
        lambda: f(2, 3) / p(3),
        lambda: w(2, 3) / z(3),
    ],
    "Fmax": binary(torch.fmax),
    "Fmin": binary(torch.fmin),
    "Fmod": [*binary(torch.fmod), lambda: torch.fmod(w(2, 3), 0.3)],
    "Hypot": binary(torch.hypot),
    "Ldexp": [lambda: torch.ldexp(w(2, 3), w(3)), lambda: torch.ldexp(c(2, 3), w(2, 1))],
    "Logaddexp": binary(torch.logaddexp),
    "Logaddexp2": binary(torch.logaddexp2),
    "Maximum": [*binary(torch.maximum), lambda: torch.maximum(w(3), torch.ones(3).double())],
    "Minimum": [*binary(torch.minimum), lambda: torch.minimum(w(3), torch.ones(3).double())],
    "Mul": [
        *binary(torch.mul, make=BOTH),
        lambda: w(2, 3) * 2.5,
        lambda: z(2, 3) * 2.5j,
        lambda: w(2, 3) * z(3),
        lambda: z(2, 3) * w(3),
        lambda: f(2, 3) * w(3),
        lambda: w(2, 3) * mask(3),
    ],
    "Polar": binary(torch.polar),
    "Pow": [
        *binary(torch.pow, make=(p, z)),
        lambda: w(2, 3) ** 2,
        lambda: w(2, 3) ** 0,
        lambda: p(2, 3) ** -1.5,
        lambda: 2.0 ** w(2, 3),
        lambda: 0.0 ** p(2, 3),
        lambda: torch.zeros(3).double().requires_grad_() ** p(2, 3),
        lambda: z(2, 3) ** 3,
    ],
    "PreluKernel": [
        lambda: F.prelu(w(2, 3, 4), w(3)),
        lambda: F.prelu(w(2, 3), w(1)),
        lambda: F.prelu(c(2, 3), w(3)),
        lambda: F.prelu(w(2, 3), c(3)),
    ],
    "Remainder": [*binary(torch.remainder), lambda: torch.remainder(w(2, 3), 0.3)],
    "Rsub": [
        *[lambda s=s: torch.rsub(*s(), alpha=2.5) for s in (lambda: (w(3), w(2, 3)), lambda: (w(2, 3), w(2, 1)))],
        lambda: torch.rsub(z(3), z(2, 3)),
        lambda: 1.5 - w(2, 3),
        lambda: torch.rsub(w(2, 3), 1.5, 2.5),
    ],
    "SpecialXlog1Py": binary(torch.special.xlog1py),
    "Sub": [
        *binary(torch.sub, make=BOTH),
        *binary(lambda a, b: torch.sub(a, b, alpha=2.5)),
        lambda: w(2, 3) - 1.5,
        lambda: w(2, 3) - z(3),
    ],
    "Xlogy": [*binary(torch.xlogy), lambda: torch.xlogy(2.0, p(3)), lambda: torch.xlogy(w(3), 2.0)],
}


def _reduced(loss: Callable[..., Tensor], left: Callable[..., Tensor], right: Callable[..., Tensor]) -> list[Sample]:
    """A loss, summed or not; parameters in one operand or in both."""
    return [
        *[lambda r=r: loss(left(2, 3), right(2, 3).detach(), reduction=r) for r in ("none", "sum", "mean")],
        lambda: loss(left(2, 3), right(2, 3), reduction="none"),
    ]


_TERNARY: Samples = {
    "Addcdiv": [
        lambda: torch.addcdiv(w(2, 3), w(3), p(2, 1), value=2.5),
        lambda: torch.addcdiv(c(3), c(3), p(2, 3)),
        lambda: torch.addcdiv(z(2, 3), z(3), z(2, 1)),
    ],
    "Addcmul": [
        lambda: torch.addcmul(w(2, 3), w(3), w(2, 1), value=2.5),
        lambda: torch.addcmul(c(3), c(3), w(2, 3)),
        lambda: torch.addcmul(z(2, 3), z(3), z(2, 1)),
    ],
    "BinaryCrossEntropy": [
        *_reduced(F.binary_cross_entropy, p, p),
        lambda: F.binary_cross_entropy(p(2, 3), p(2, 3).detach(), weight=c(3), reduction="none"),
    ],
    "BinaryCrossEntropyWithLogits": [
        *_reduced(F.binary_cross_entropy_with_logits, w, p),
        lambda: F.binary_cross_entropy_with_logits(w(2, 3), p(2, 3).detach(), weight=c(3), pos_weight=p(3).detach()),
    ],
    "Clamp": [
        lambda: w(2, 3).clamp(-0.5, 0.5),
        lambda: w(2, 3).clamp(min=0.0),
        lambda: w(2, 3).clamp(max=0.0),
        lambda: w(2, 3).clamp(w(3), c(2, 1)),
        lambda: w(3).clamp(max=w(2, 3)),
    ],
    "ClampMax": [lambda: torch.clamp_max(w(2, 3), 0.1), lambda: torch.clamp_max(w(2, 3), w(3))],
    "ClampMin": [lambda: torch.clamp_min(w(2, 3), 0.1), lambda: torch.clamp_min(w(2, 3), w(3))],
    "Complex": [lambda: torch.complex(w(2, 3), w(3)), lambda: torch.complex(w(3), c(2, 1))],
    "HuberLoss": _reduced(F.huber_loss, w, w),
    "Lerp": [
        lambda: torch.lerp(w(2, 3), w(3), 0.3),
        lambda: torch.lerp(w(2, 3), w(3), w(2, 1)),
        lambda: torch.lerp(c(3), w(3), c(2, 3)),
        lambda: torch.lerp(z(2, 3), z(3), z(2, 1)),
    ],
    "MaskedFill": [
        lambda: w(2, 3).masked_fill(mask(3), 2.5),
        lambda: w(3).masked_fill(mask(2, 3), w()),
        lambda: w().masked_fill(mask(2, 3), 1.0),
        lambda: z(2, 3).masked_fill(mask(2, 1), z()),
    ],
    "MseLoss": _reduced(F.mse_loss, w, w),
    "NativeDropout": [lambda: torch.native_dropout(w(2, 3), 0.5, True)[0]],
    "SmoothL1Loss": _reduced(F.smooth_l1_loss, w, w),
    "Where": [
        lambda: torch.where(mask(2, 3), w(3), w(2, 1)),
        lambda: torch.where(mask(2, 1), w(2, 3), 0.0),
        lambda: torch.where(mask(3), c(2, 3), w()),
        lambda: torch.where(mask(2, 3), z(3), z(2, 1)),
    ],
}

POINTWISE: Samples = {**_UNARY, **_BINARY, **_TERNARY}
