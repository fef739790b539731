"""Ops that the other samples leave out: those of double backwards, of images in one and three dims, private ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .leaves import Sample, Samples, c, f, ids, mask, p, w, z

_aten = torch.ops.aten


def _twice(fn: Callable[..., Tensor], *makes: Callable[..., Tensor]) -> list[Sample]:
    """The gradient of an op, as an op of its own: of a cotangent with parameters, too."""

    def build(shape: tuple[int, ...], makes: tuple[Callable[..., Tensor], ...] = makes or (w,)) -> Tensor:
        operands = [make(*shape) for make in makes]
        result = fn(*operands)
        (found,) = torch.autograd.grad(result, operands[0], w(*result.shape), create_graph=True)
        return found

    return [lambda: build((2, 3)), lambda: build((4, 4))]


def _constant(*shape: int) -> Tensor:
    return p(*shape).detach()


_DOUBLE: Samples = {
    "BinaryCrossEntropyBackward": _twice(lambda x, y: F.binary_cross_entropy(x, y, reduction="none"), p, _constant),
    "EluBackward": _twice(F.elu),
    "GeluBackward": _twice(F.gelu),
    "HardshrinkBackward": _twice(F.hardshrink),
    "HardswishBackward": _twice(F.hardswish),
    "HardtanhBackward": _twice(F.hardtanh),
    "HuberLossBackward": _twice(lambda x, y: F.huber_loss(x, y, reduction="none"), w, w),
    "LeakyReluBackward": _twice(F.leaky_relu),
    "LogSigmoidBackward": _twice(F.logsigmoid),
    "MseLossBackward": _twice(lambda x, y: F.mse_loss(x, y, reduction="none"), w, w),
    "NativeDropoutBackward": [lambda: _aten.native_dropout_backward(w(2, 3), mask(2, 3), 2.0)],
    "PreluKernelBackward": _twice(lambda x: F.prelu(x, w(x.shape[1]))),
    "SigmoidBackward": _twice(torch.sigmoid),
    "SmoothL1LossBackward": _twice(lambda x, y: F.smooth_l1_loss(x, y, reduction="none"), w, w),
    "SoftplusBackward": _twice(F.softplus),
    "SoftshrinkBackward": _twice(F.softshrink),
    "TanhBackward": _twice(torch.tanh),
    "ThresholdBackward": _twice(F.relu),
}

_POINTWISE: Samples = {
    "Bernoulli": [lambda: torch.bernoulli(p(2, 3))],
    "ConjPhysical": [lambda: torch.conj_physical(z(2, 3))],
    "Fill": [lambda: w(2, 3).clone().fill_(w()), lambda: torch.fill(c(2, 3), w())],
    "Lift": [lambda: _aten.lift(w(2, 3))],
    "LiftFresh": [lambda: _aten.lift_fresh(w(2, 3))],
    "NegView": [lambda: torch._neg_view(w(2, 3))],
    "RreluWithNoise": [lambda: F.rrelu(w(2, 3), training=True)],
    "SoftMarginLoss": [
        lambda: F.soft_margin_loss(w(2, 3), torch.ones(2, 3).double(), reduction="none"),
        lambda: F.soft_margin_loss(w(4, 4), torch.ones(4, 4).double(), reduction="none"),
    ],
    "SpecialZeta": [lambda: torch.special.zeta(2.5, p(2, 3)), lambda: torch.special.zeta(c(3).abs() + 2, p(2, 3))],
    "StandardGamma": [lambda: torch._standard_gamma(p(2, 3))],
    "Zero": [lambda: w(2, 3).clone().zero_()],
}

_SCALES = (3,)


def _normed(fn: Callable[..., Tensor], *statistics: Callable[..., Tensor]) -> list[Sample]:
    """A batch norm of private name: images, and rows."""
    return [
        lambda shape=shape: fn(w(*shape), w(*_SCALES), w(*_SCALES), *[make(*_SCALES) for make in statistics])
        for shape in ((2, 3, 4), (4, 3))
    ]


_NORMS: Samples = {
    "NativeBatchNormLegit": [
        *_normed(lambda x, a, b, m, v: _aten._native_batch_norm_legit(x, a, b, m, v, True, 0.1, 1e-5)[0], c, _constant),
        *_normed(
            lambda x, a, b, m, v: _aten._native_batch_norm_legit(x, a, b, m, v, False, 0.1, 1e-5)[0], c, _constant
        ),
        *_normed(lambda x, a, b: _aten._native_batch_norm_legit.no_stats(x, a, b, True, 0.1, 1e-5)[0]),
    ],
    "NativeBatchNormLegitNoTraining": _normed(
        lambda x, a, b, m, v: _aten._native_batch_norm_legit_no_training(x, a, b, m, v, 0.1, 1e-5)[0], c, _constant
    ),
    "BatchNormWithUpdate": _normed(
        lambda x, a, b, m, v: _aten._batch_norm_with_update(x, a, b, m, v, 0.1, 1e-5)[0], c, _constant
    ),
    "BatchNormNoUpdate": _normed(
        lambda x, a, b, m, v: _aten._batch_norm_no_update(x, a, b, m, v, 0.1, 1e-5)[0], c, _constant
    ),
}

_SPACE: Samples = {
    "AdaptiveAvgPool3D": [lambda: F.adaptive_avg_pool3d(w(2, 3, 4, 4, 4), 2)],
    "AdaptiveMaxPool3D": [lambda: F.adaptive_max_pool3d(w(2, 3, 4, 4, 4), 2)],
    "ConvTbc": [
        lambda: torch.conv_tbc(w(5, 3, 4), w(2, 4, 6), w(6), 1),
        lambda: torch.conv_tbc(w(4, 4, 4), w(3, 4, 4), w(4), 1),  # T, B and channels have one size
        lambda: torch.conv_tbc(c(4, 4, 4), w(1, 4, 4), w(4)),
        lambda: torch.conv_tbc(w(4, 3, 2), c(4, 2, 5), w(5)),  # one window
        lambda: torch.conv_tbc(c(4, 3, 2), w(1, 2, 5), c(5), 2),  # windows of zeros alone
        lambda: torch.conv_tbc(f(3, 3, 2), f(2, 2, 3), f(3)),
    ],
    "FractionalMaxPool3D": [lambda: F.fractional_max_pool3d(w(2, 3, 4, 4, 4), 2, output_size=2)],
    "GridSampler3D": [
        lambda: F.grid_sample(w(2, 2, 3, 3, 3), w(2, 2, 2, 2, 3).tanh(), align_corners=False),
    ],
    "MaxUnpool3D": [lambda: F.max_unpool3d(*F.max_pool3d(w(2, 3, 4, 4, 4), 2, return_indices=True), 2)],
    "MkldnnConvolution": [
        lambda: torch.mkldnn_convolution(f(2, 3, 4, 4), f(2, 3, 2, 2), None, (0, 0), (1, 1), (1, 1), 1)
    ],
    "ReflectionPad3D": [lambda: F.pad(w(2, 3, 3, 3, 3), (1, 1, 1, 0, 0, 1), mode="reflect")],
    "ReplicationPad2D": [lambda: F.pad(w(2, 3, 3, 3), (1, 1, 1, 0), mode="replicate")],
    "ReplicationPad3D": [lambda: F.pad(w(2, 3, 3, 3, 3), (1, 1, 1, 0, 0, 1), mode="replicate")],
    "ReshapeCopy": [lambda: _aten._reshape_copy(w(2, 6), [3, 4])],
    "SlowConvDilated2D": [
        lambda: _aten.slow_conv_dilated2d(w(2, 3, 5, 5), w(4, 3, 2, 2), (2, 2), w(4), (1, 1), (0, 0), (2, 2))
    ],
    "SlowConvDilated3D": [
        lambda: _aten.slow_conv_dilated3d(
            w(2, 3, 4, 4, 4), w(4, 3, 2, 2, 2), (2, 2, 2), w(4), (1, 1, 1), (0, 0, 0), (2, 2, 2)
        )
    ],
    "TriangularSolve": [lambda: torch.triangular_solve(w(3, 2), w(3, 3))[0]],
    "UpsampleBicubic2DAa": [lambda: F.interpolate(w(2, 3, 3, 3), scale_factor=2, mode="bicubic", antialias=True)],
    "UpsampleNearest1D": [lambda: F.interpolate(w(2, 3, 3), scale_factor=2)],
    "UpsampleNearest3D": [lambda: F.interpolate(w(2, 3, 2, 2, 2), scale_factor=2)],
    "UpsampleNearestExact2D": [lambda: F.interpolate(w(2, 3, 3, 3), scale_factor=2, mode="nearest-exact")],
    "UpsampleNearestExact3D": [lambda: F.interpolate(w(2, 3, 2, 2, 2), scale_factor=2, mode="nearest-exact")],
    "Cholesky": [lambda: torch.cholesky(w(3, 3).detach().double() @ w(3, 3) + 9 * torch.eye(3))],
}

_TABLES: Samples = {
    "UnsafeIndex": [
        lambda: _aten._unsafe_index(w(4, 3), [ids(4, 4)]),
        lambda: _aten._unsafe_index(w(2, 4, 3), [None, ids(4, 2)]),
    ],
    "SparseAddmm": [
        lambda: torch.sparse.addmm(w(4, 2), c(4, 3).to_sparse(), w(3, 2), beta=0.5, alpha=2),
        lambda: torch.sparse.addmm(w(4, 4), c(4, 4).to_sparse(), w(4, 4)),
    ],
}

# Products over no numbers at all.
_EMPTY: Samples = {
    "Addbmm": [
        lambda: torch.addbmm(w(4, 4), w(0, 4, 3), w(0, 3, 4)),
        lambda: torch.addbmm(w(4), c(2, 4, 0), w(2, 0, 4)),
    ],
    "Addmm": [lambda: torch.addmm(w(4), c(4, 0), w(0, 4), beta=0.5), lambda: torch.addmm(w(4, 1), w(4, 0), c(0, 4))],
    "Addmv": [lambda: torch.addmv(w(4), c(4, 0), w(0))],
    "Baddbmm": [lambda: torch.baddbmm(w(4), c(2, 4, 0), w(2, 0, 4))],
    "Bmm": [lambda: c(2, 4, 0).bmm(w(2, 0, 4)), lambda: w(2, 4, 0).bmm(c(2, 0, 4))],
    "Mm": [lambda: c(4, 0).mm(w(0, 4)), lambda: w(4, 0).mm(c(0, 4))],
    "Mv": [lambda: c(4, 0).mv(w(0))],
}

RARER: Samples = {**_DOUBLE, **_POINTWISE, **_NORMS, **_SPACE, **_TABLES, **_EMPTY}
