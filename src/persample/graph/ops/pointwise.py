"""Elementwise ops with broadcasting: the sample stays where it is, or is summed away.

Parameters enter them as biases, scales, tokens and gates.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...factors import Factor, View
from ...factors.maps import are_moderate, inner_with, scaled
from ...factors.rearrange import Cast
from ..layout import Flow, Labels, Outcome, Shape, broadcast_dims, carry
from ..read.invoke import call
from ..read.site import Site
from .broadcast import dense
from .dims import only
from .table import EVERY, Aten, Layouts, Undecided, op
from .use import Use


def elementwise(site: Site, k: int, layouts: Layouts) -> Outcome:
    """An operand that was broadcast along the sample dim has a gradient that sums over samples."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    if shape == target:
        return layout
    if len(shape) < len(target):  # a loss that was averaged, or an operand in place: one element for all
        raise Undecided
    moved = carry(layout, shape, target, broadcast_dims(shape, target))
    if moved is None and isinstance(layout, Labels) and layout.index.numel() == 1:
        return Labels(layout.batch, layout.index.reshape([1] * len(target)))
    return Flow.SHARED if moved is None else moved


def backward(use: Use) -> Factor | None:
    """The op's own backward, summed per sample where the engine would sum over all."""
    return _summed(use, _called(use))


def _called(use: Use) -> Tensor | None:
    return call(use.site.node, use.cotangents, use.site.edges)[use.k]


def _summed(use: Use, value: Tensor | None) -> Factor | None:
    """The factor of an operand, from its gradient before the sum over broadcast dims."""
    if value is None or value.shape != use.g.shape:
        return None
    dtype = use.site.metadata(use.k).dtype
    if value.is_complex() and not dtype.is_complex:
        value = value.real
    return dense(value, use.layout, use.target, dtype)


def expand(use: Use) -> Factor | None:
    """The cotangent, summed per sample."""
    return _summed(use, use.g)


def add(use: Use) -> Factor | None:
    """self + alpha · other: the cotangent, summed per sample."""
    return _summed(use, use.g if use.k == 0 or use.site.value("alpha") == 1 else _called(use))


def subtract(use: Use) -> Factor | None:
    """self - alpha · other: the cotangent or its negative, summed per sample."""
    if use.k and use.site.value("alpha") != 1:
        return backward(use)
    return _summed(use, -use.g if use.k else use.g)


def multiply(use: Use) -> Factor | None:
    """self · other: the cotangent times the other operand, whose own gradient is not computed."""
    site, g = use.site, use.g
    if len(site.edges) == 2 and not g.is_complex():  # with one, the other operand is a number
        other = site.optional("self" if use.k == 1 else "other")
        if other is not None and not other.is_complex():
            return _summed(use, g * other)
    return backward(use)


def same(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """A copy."""
    return factor


def cast(site: Site, factor: Factor, target: Shape) -> Factor | None:
    """Another dtype."""
    return View(factor, target, Cast(factor.dtype, site.metadata(0).dtype))


def _times(site: Site, k: int, factor: Factor, other: Tensor) -> Factor | None:
    """Gradients times the other operand, summed where this one was broadcast."""
    target = site.target(k)
    return scaled(factor, other) if target == factor.shape else inner_with(factor, other, target)


def _operand(site: Site, name: str, like: Factor) -> Tensor | None:
    """A saved operand, or a number in its place, which has no device and is no fake even where all tensors are."""
    held = site.value(name)
    if type(held) is Tensor and held.ndim == 0 and held.device.type == "cpu" and not held.requires_grad:
        held = held.tolist()
    if isinstance(held, (int, float)):
        return torch.tensor(held, dtype=like.dtype, device=like.device)
    return None if isinstance(held, complex) else site.optional(name)


def through_sum(site: Site, k: int, factor: Factor, sign: int = 1) -> Factor | None:
    """self + alpha · other."""
    number = sign * site.value("alpha") if k else 1
    if factor.shape != site.target(k):
        return None
    return factor if number == 1 else scaled(factor, torch.tensor(number, dtype=factor.dtype, device=factor.device))


through_difference = partial(through_sum, sign=-1)


def through_product(site: Site, k: int, factor: Factor) -> Factor | None:
    """self · other."""
    other = _operand(site, "self" if k else "other", factor)
    return None if other is None else _times(site, k, factor, other)


def through_quotient(site: Site, k: int, factor: Factor) -> Factor | None:
    """self / other: one over the other, or -self / other²; what is rounded has no slope."""
    other = _operand(site, "other", factor)
    rounds = site.has("rounding_mode") and site.value("rounding_mode") is not None
    if other is None or other.is_complex() or rounds or not are_moderate(other):
        return None
    other = other.to(factor.dtype)
    if k == 0:
        return _times(site, k, factor, other.reciprocal())
    if site.target(k) == factor.shape:
        return scaled(factor, -(site.tensor("self").to(factor.dtype) / other) / other)
    inner = inner_with(factor, site.tensor("self"), site.target(k))
    return None if inner is None else scaled(inner, -other.square().reciprocal())


def through_negative(site: Site, k: int, factor: Factor) -> Factor | None:
    """-self."""
    return scaled(factor, torch.tensor(-1.0, dtype=factor.dtype, device=factor.device))


def through_slope(site: Site, k: int, factor: Factor) -> Factor | None:
    """A function of every element: gradients times its slope, which is what the node makes of ones.

    Only for backwards that multiply: one that leaves elements out does not turn NaN there into NaN.
    """
    if factor.dtype.is_complex or factor.shape != site.target(k):
        return None
    ones = torch.ones(factor.shape, dtype=factor.dtype, device=factor.device)
    slope = call(site.node, [ones], site.edges)[k]
    return None if slope is None or slope.is_complex() else scaled(factor, slope)


_op = partial(op, flow={EVERY: elementwise}, by_shape=True, pointwise=True, rule=backward)

_COPIES = tuple(Aten(f"{name}.default", ("self",)) for name in ("clone", "alias", "detach"))
_CASTS = (Aten("_to_copy.default", ("self",)), Aten("prims.convert_element_type.default", ("a",)))

_op("Clone", vmap=True, view=True, lift=same, shape_follows=True, aten=_COPIES)
_op("Alias", vmap=True, view=True, lift=same)
_op("ToCopy", vmap=True, view=True, lift=cast, aten=_CASTS)
_op("Expand", rule=expand, vmap=True, shares_memory=True, new_rows=lambda node, shape: ())
_op("Add", rule=add, vmap=True, shape_follows=True, through=dict.fromkeys((0, 1), through_sum))
_op("Sub", rule=subtract, vmap=True, shape_follows=True, through=dict.fromkeys((0, 1), through_difference))
_op("Mul", rule=multiply, vmap=True, shape_follows=True, through=dict.fromkeys((0, 1), through_product))
_op("Div", vmap=True, shape_follows=True, through=dict.fromkeys((0, 1), through_quotient))
_op("Neg", vmap=True, shape_follows=True, through={0: through_negative})
_SLOPE = {0: through_slope}
_op("Relu", vmap=True, shape_follows=True)
_op(
    "Cos Elu Exp Gelu LeakyRelu Log Rsqrt Sigmoid Silu Sin Softplus Sqrt Tanh",
    vmap=True,
    shape_follows=True,
    through=_SLOPE,
)
_op(
    "Abs Acos Acosh Asin Asinh Atan Atanh Celu Cosh Deg2Rad Digamma Erf Erfc Erfinv Exp2 Expm1 Lgamma Log10 Log1P Log2"
    " LogSigmoid Pow Rad2Deg Reciprocal Sinh Tan",
    vmap=True,
    through=_SLOPE,
)
_op(
    "Addcdiv Addcmul Angle Atan2 BinaryCrossEntropy BinaryCrossEntropyWithLogits Ceil Clamp ClampMax ClampMin Complex"
    " Conj Copysign Floor Fmax Fmin Fmod Frac Hardshrink Hardsigmoid Hardswish Hardtanh HuberLoss Hypot I0 Ldexp Lerp"
    " Logaddexp Logaddexp2 Logit MaskedFill Maximum Minimum MseLoss NanToNum NativeDropout Polar Polygamma PreluKernel"
    " Remainder Round Rsub Sgn Sign Sinc SmoothL1Loss Softshrink SpecialEntr SpecialErfcx SpecialI0E SpecialI1"
    " SpecialI1E SpecialLogNdtr SpecialNdtri SpecialXlog1Py Threshold Tril Triu Trunc Where Xlogy",
    vmap=True,
)
_op(
    "Bernoulli BinaryCrossEntropyBackward ConjPhysical CopyBackwards EluBackward Fill FusedDropout GeluBackward"
    " HardshrinkBackward HardswishBackward HardtanhBackward HuberLossBackward LeakyReluBackward Lift LiftFresh"
    " LogSigmoidBackward Mish MseLossBackward NativeDropoutBackward NegView PreluKernelBackward RreluWithNoise"
    " SigmoidBackward SmoothL1LossBackward SoftMarginLoss SoftplusBackward SoftshrinkBackward SpecialZeta"
    " StandardGamma TanhBackward ThresholdBackward Zero"
)
