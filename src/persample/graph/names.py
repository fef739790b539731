"""Groups of autograd nodes, by the name of the op without the suffix Backward0."""

from __future__ import annotations

# Elementwise ops: the result has the operands' shape, but for broadcasting.
POINTWISE = frozenset(
    """
    Abs Acos Acosh Add Addcdiv Addcmul Alias Angle Asin Asinh Atan Atan2 Atanh Bernoulli BinaryCrossEntropy
    BinaryCrossEntropyWithLogits Ceil Celu Clamp ClampMax ClampMin Clone Complex Conj ConjPhysical Copysign
    CopyBackwards Cos Cosh Deg2Rad Digamma Div Elu Erf Erfc Erfinv Exp Exp2 Expand Expm1 Fill Floor Fmax
    Fmin Fmod Frac FusedDropout Gelu Hardshrink Hardsigmoid Hardswish Hardtanh HuberLoss Hypot I0 LeakyRelu
    Ldexp Lerp Lgamma Lift LiftFresh Log Log10 Log1P Log2 Logaddexp Logaddexp2 LogSigmoid Logit MaskedFill Maximum
    Minimum Mish MseLoss Mul NanToNum NativeDropout Neg NegView Polar Polygamma Pow PreluKernel Rad2Deg
    Reciprocal Relu Remainder Round RreluWithNoise Rsqrt Rsub Sgn Sigmoid Sign Silu Sin Sinc Sinh SmoothL1Loss
    SoftMarginLoss Softplus Softshrink SpecialEntr SpecialErfcx SpecialI0E SpecialI1 SpecialI1E SpecialLogNdtr
    SpecialNdtri SpecialXlog1Py SpecialZeta Sqrt StandardGamma Sub Tan Tanh Threshold ToCopy Tril Triu Trunc Where
    Xlogy Zero EluBackward GeluBackward HardshrinkBackward HardswishBackward HardtanhBackward LeakyReluBackward
    LogSigmoidBackward MseLossBackward NativeDropoutBackward PreluKernelBackward SigmoidBackward
    SmoothL1LossBackward SoftplusBackward SoftshrinkBackward TanhBackward ThresholdBackward
    BinaryCrossEntropyBackward HuberLossBackward
    """.split()
)

# Views and casts of one tensor.
WEIGHT_VIEWS = frozenset(
    """
    T Transpose Permute View UnsafeView ReshapeAlias Unsqueeze Squeeze ToCopy Clone Alias
    """.split()
)

# Ops whose result may have rows of the batch though no operand shows it: reads by index, and expansion to B rows.
READS = frozenset(
    """
    Expand Embedding EmbeddingBag Index UnsafeIndex IndexSelect Gather Take MaskedSelect CopySlices
    """.split()
)
