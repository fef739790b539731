"""Elementwise ops with broadcasting: the sample stays where it is, or is summed away."""

from __future__ import annotations

from functools import lru_cache

from ..layout import Labels, Shape, carry
from ..site import Fate, Flow, Site
from .registry import Layouts, flow, only

POINTWISE = """
Abs Acos Acosh Add Addcdiv Addcmul Alias Angle Asin Asinh Atan Atan2 Atanh Bernoulli BinaryCrossEntropy
BinaryCrossEntropyWithLogits Ceil Celu Clamp ClampMax ClampMin Clone Complex Conj ConjPhysical Copysign Copy
CopyBackwards Cos Cosh Deg2Rad Detach Digamma Div Elu Erf Erfc Erfinv Exp Exp2 Expand Expm1 Fill Floor Fmax Fmin
Fmod Frac FusedDropout Gelu Hardshrink Hardsigmoid Hardswish Hardtanh HuberLoss Hypot I0 Imag LeakyRelu Ldexp
Lerp Lgamma Lift LiftFresh Log Log10 Log1P Log2 Logaddexp Logaddexp2 LogSigmoid Logit MaskedFill Maximum Minimum
Mish MseLoss Mul NanToNum NativeDropout Neg NegView Polar Polygamma Pow PreluKernel Rad2Deg Real Reciprocal Relu
Remainder Round RreluWithNoise Rsqrt Rsub Sgn Sigmoid Sign Silu Sin Sinc Sinh SmoothL1Loss SoftMarginLoss Softplus
Softshrink SpecialEntr SpecialErfcx SpecialI0E SpecialI1 SpecialI1E SpecialLogNdtr SpecialNdtri SpecialXlog1Py
SpecialZeta Sqrt StandardGamma Sub Tan Tanh Threshold ToCopy Tril Triu Trunc Where Xlogy Zero

EluBackward GeluBackward HardshrinkBackward HardswishBackward HardtanhBackward LeakyReluBackward LogSigmoidBackward
MseLossBackward NativeDropoutBackward PreluKernelBackward SigmoidBackward SmoothL1LossBackward SoftplusBackward
SoftshrinkBackward TanhBackward ThresholdBackward SiluBackward MishBackward BinaryCrossEntropyBackward HuberLossBackward
"""


@lru_cache(maxsize=65536)
def broadcast_dims(shape: Shape, target: Shape) -> tuple[int | None, ...]:
    """For every dim of ``shape``, the dim of the broadcast operand ``target`` it came from (None: repeated)."""
    offset = len(shape) - len(target)
    return tuple(d - offset if d >= offset and target[d - offset] == n else None for d, n in enumerate(shape))


@flow(POINTWISE)
def pointwise(site: Site, k: int, layouts: Layouts) -> Fate:
    """An operand that was broadcast along the sample dim has a gradient that sums over samples."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    if shape == target:
        return layout
    if len(shape) < len(target):  # a loss that was averaged, or an operand in place: one element for all
        return Flow.PROBE
    found = carry(layout, shape, target, broadcast_dims(shape, target))
    if found is None and isinstance(layout, Labels) and layout.index.numel() == 1:
        return Labels(layout.batch, layout.index.reshape([1] * len(target)))
    return Flow.SHARED if found is None else found
