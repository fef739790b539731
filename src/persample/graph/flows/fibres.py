"""Ops that mix elements along some dims (softmax, norms, convolutions, attention, pooling) and leave others alone."""

from __future__ import annotations

from ..layout import Layout, Shape, carry, same, sample_dims
from ..site import Fate, Flow, Site
from .registry import Layouts, flow, keep, only


def leading(shape: Shape, kept: int) -> list[int | None]:
    """Keep the first dims only."""
    return [d if d < kept else None for d in range(len(shape))]


@flow(
    "Softmax SafeSoftmax LogSoftmax Cumsum Cumprod Logcumsumexp Cummax Cummin Sort Topk Glu Gather"
    " Scatter ScatterAdd ScatterReduce"
)
def along_dim(site: Site, k: int, layouts: Layouts) -> Fate:
    """Fibres along one dim."""
    layout, shape, target = only(layouts), site.shapes[0], site.target(k)
    if not shape or len(shape) != len(target):
        return Flow.PROBE
    if k == 1 and site.name in _SCATTERS and tuple(site.tensor("index").shape) != target:  # PyTorch repeats or refuses
        return Flow.PROBE
    (dim,) = site.dims("dim", len(shape))
    return keep(layout, shape, target, [None if d == dim else d for d in range(len(shape))])


_SCATTERS = frozenset({"Scatter", "ScatterAdd", "ScatterReduce"})


@flow("FftR2C FftC2R FftC2C")
def fourier(site: Site, k: int, layouts: Layouts) -> Fate:
    """The transformed dims are mixed."""
    shape = site.shapes[0]
    mixed = site.dims("dim", len(shape))
    return keep(only(layouts), shape, site.target(k), [None if d in mixed else d for d in range(len(shape))])


CONVOLUTIONS = (
    "Convolution MkldnnConvolution CudnnConvolution ConvolutionOverrideable SlowConvDilated2D SlowConvDilated3D".split()
)


@flow(" ".join([*CONVOLUTIONS, "NativeGroupNorm"]))
def convolution(site: Site, k: int, layouts: Layouts) -> Fate:
    """Images are dim 0; weight and bias, or scale and shift, are shared by all of them."""
    layout, shape = only(layouts), site.shapes[0]
    if k == 0:
        return keep(layout, shape, site.target(0), leading(shape, 1))
    return Flow.SHARED if sample_dims(layout, shape) == (0,) else Flow.PROBE


# Ops that compute with data and weights, and whose results have data in common along some dims.
WINDOWS = frozenset([*CONVOLUTIONS, "NativeGroupNorm", "NativeLayerNorm", "FusedRmsNorm", "MkldnnRnnLayer"])


def mixed_dims(site: Site) -> tuple[Shape, Shape]:
    """The cotangent's shape, with channels split by group, and those of its dims."""
    shape = site.shapes[0]
    if site.name in CONVOLUTIONS:
        kernel, groups = site.target_or_saved(1, "weight")[2:], site.number("groups") if site.has("groups") else 1
        sliding = [d + 3 for d, size in enumerate(kernel) if size > 1]
        return _by_group(shape, groups), (2, *sliding)
    if site.name == "NativeGroupNorm":
        return _by_group(shape, site.number("group")), tuple(range(2, len(shape) + 1))
    if site.name == "MkldnnRnnLayer":
        return shape, tuple(d for d in range(len(shape)) if d != len(shape) - 2)
    return shape, tuple(range(len(shape) - len(site.numbers("normalized_shape")), len(shape)))


def _by_group(shape: Shape, groups: int) -> Shape:
    return (shape[0], groups, shape[1] // max(groups, 1), *shape[2:])


@flow("NativeLayerNorm FusedRmsNorm")
def layer_norm(site: Site, k: int, layouts: Layouts) -> Fate:
    """Mixes the last dims; scale and shift are shared."""
    layout, shape = only(layouts), site.shapes[0]
    kept = len(shape) - len(site.numbers("normalized_shape"))
    if k == 0:
        return keep(layout, shape, site.target(0), leading(shape, kept))
    return Flow.SHARED if all(d < kept for d in sample_dims(layout, shape)) else Flow.PROBE


BATCH_NORMS = (
    "NativeBatchNorm NativeBatchNormLegit NativeBatchNormLegitNoTraining BatchNormWithUpdate BatchNormNoUpdate"
    " CudnnBatchNorm MiopenBatchNorm"
)


def normalises_batch(site: Site) -> bool:
    """Does this batch norm use the statistics of the batch?"""
    return bool(site.value("training")) if site.has("training") else not site.name.endswith(("NoTraining", "NoUpdate"))


@flow(BATCH_NORMS)
def batch_norm(site: Site, k: int, layouts: Layouts) -> Fate:
    """Channels (dim 1) are apart from one another; the rest is mixed in training mode, left alone in eval mode."""
    layout, shape = only(layouts), site.shapes[0]
    if k == 0 and not normalises_batch(site):
        return layout
    channel = 1 if len(shape) > 1 else 0
    if k == 0:
        return keep(layout, shape, site.target(0), [d if d == channel else None for d in range(len(shape))])
    found = carry(layout, shape, site.target(k), [0 if d == channel else None for d in range(len(shape))])
    return Flow.SHARED if found is None else found


_LAST: dict[int, str] = {
    1: "ReflectionPad1D ReplicationPad1D UpsampleLinear1D UpsampleNearest1D UpsampleNearestExact1D",
    2: "ReflectionPad2D ReplicationPad2D UpsampleBilinear2D UpsampleBilinear2DAa UpsampleBicubic2D UpsampleBicubic2DAa"
    " UpsampleNearest2D UpsampleNearestExact2D AvgPool2D AdaptiveAvgPool2D AdaptiveMaxPool2D MaxPool2D"
    " MaxPool2DWithIndices FractionalMaxPool2D MaxUnpool2D MkldnnMaxPool2D MkldnnAdaptiveAvgPool2D",
    3: "ReflectionPad3D ReplicationPad3D UpsampleTrilinear3D UpsampleNearest3D UpsampleNearestExact3D AvgPool3D"
    " AdaptiveAvgPool3D AdaptiveMaxPool3D MaxPool3DWithIndices FractionalMaxPool3D MaxUnpool3D MkldnnMaxPool3D"
    " PixelShuffle PixelUnshuffle",
}


@flow(" ".join(_LAST.values()))
def spatial(site: Site, k: int, layouts: Layouts) -> Fate:
    """The last one, two or three dims are pooled, padded, resized or shuffled."""
    shape, target = site.shapes[0], site.target(k)
    return keep(only(layouts), shape, target, leading(shape, len(shape) - _MIXED_LAST[site.name]))


_MIXED_LAST = {name: n for n, names in _LAST.items() for name in names.split()}


@flow("GridSampler2D GridSampler3D AffineGridGenerator Im2Col Col2Im ChannelShuffle CudnnGridSampler")
def images(site: Site, k: int, layouts: Layouts) -> Fate:
    """Whatever happens to an image, dim 0 counts the images."""
    shape, target = site.shapes[0], site.target(k)
    ranks = {"Im2Col": 3, "Col2Im": 4, "ChannelShuffle": len(target)}  # of a batch; otherwise it is one image
    batched = len(shape) == ranks.get(site.name, len(shape))
    return keep(only(layouts), shape, target, leading(shape, 1)) if batched else Flow.PROBE


@flow(
    "ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention ScaledDotProductEfficientAttention"
    " ScaledDotProductCudnnAttention ScaledDotProductFusedAttentionOverrideable"
)
def attention(site: Site, k: int, layouts: Layouts) -> Fate:
    """Batch and head dims are left alone."""
    if k > 2:
        return Flow.PROBE
    return keep(only(layouts), site.shapes[0], site.target(k), leading(site.shapes[0], 2))


@flow(
    "LinalgInvEx LinalgSolveEx LinalgCholeskyEx Cholesky CholeskySolve CholeskyInverse LinalgSolveTriangular"
    " TriangularSolve LinalgDet LinalgSlogdet LinalgSvd LinalgEigh LinalgQr LinalgMatrixExp LinalgPinv LinalgLuFactorEx"
)
def matrices(site: Site, k: int, layouts: Layouts) -> Fate:
    """Matrix functions act on the last two dims."""
    target = site.target(k)
    live = [(s, lay) for s, lay in zip(site.shapes, layouts, strict=True) if lay is not None]
    if len(live) != 1 or len(target) < 3:
        return Flow.PROBE
    shape, layout = live[0]
    if len(shape) > len(target):  # a broadcast operand
        return Flow.PROBE
    return keep(layout, shape, target, leading(shape, len(target) - 2))


@flow("NllLoss NllLoss2D MultiMarginLoss MultilabelMarginLoss")
def class_losses(site: Site, k: int, layouts: Layouts) -> Fate:
    """(N, ...) came from (N, C, ...)."""
    shape, target = site.shapes[0], site.target(k)
    if len(target) != len(shape) + 1:
        return Flow.PROBE
    return keep(only(layouts), shape, target, [d + (d > 0) for d in range(len(shape))])


@flow("CtcLoss CudnnCtcLoss")
def ctc(site: Site, k: int, layouts: Layouts) -> Fate:
    """(N,) came from (T, N, C)."""
    shape, target = site.shapes[0], site.target(k)
    if len(target) != 3 or len(shape) != 1:
        return Flow.PROBE
    return keep(only(layouts), shape, target, [1])


@flow("MkldnnRnnLayer")
def fused_lstm(site: Site, k: int, layouts: Layouts) -> Fate:
    """Output (T, B, h), states (B, h); weights are outputs 1 to 4 and shared."""
    if 1 <= k <= 4:
        return Flow.SHARED
    found: Layout | None = None
    for shape, layout in zip(site.shapes, layouts, strict=True):
        if layout is not None:
            to_dims = [len(site.target(k)) - 2 if d == len(shape) - 2 else None for d in range(len(shape))]
            moved = carry(layout, shape, site.target(k), to_dims)
            if moved is None or (found is not None and not same(found, moved)):
                return Flow.PROBE
            found = moved
    return found
