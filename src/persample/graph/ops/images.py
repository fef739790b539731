"""Images: pooling, padding, resizing, shuffling and sampling."""

from __future__ import annotations

from ..layout import Outcome
from ..read.site import Site
from .dims import keep, leading, only
from .table import Aten, FlowRule, Layouts, op


def last_dims(mixed: int) -> FlowRule:
    """The last dims are pooled, padded, resized or shuffled."""

    def flow(site: Site, k: int, layouts: Layouts) -> Outcome:
        shape = site.shapes[0]
        return keep(only(layouts), shape, site.target(k), leading(shape, len(shape) - mixed))

    flow.__doc__ = f"Of the last {mixed} dims, nothing stays." if mixed > 1 else "Of the last dim, nothing stays."
    return flow


def batches(rank: int | None = None) -> FlowRule:
    """Whatever happens to images of this rank, or of that of the results, dim 0 counts them."""

    def flow(site: Site, k: int, layouts: Layouts) -> Outcome:
        shape = site.shapes[0]
        return keep(only(layouts), shape, site.target(k), leading(shape, 1), rank)

    flow.__doc__ = "Dim 0 counts the images, and stays."
    return flow


op(
    "ReflectionPad1D ReplicationPad1D UpsampleLinear1D UpsampleNearest1D UpsampleNearestExact1D",
    flow=last_dims(1),
)
op(
    "ReflectionPad2D ReplicationPad2D UpsampleBilinear2D UpsampleBilinear2DAa UpsampleBicubic2D UpsampleBicubic2DAa"
    " AdaptiveMaxPool2D MaxPool2D FractionalMaxPool2D MaxUnpool2D MkldnnMaxPool2D MkldnnAdaptiveAvgPool2D",
    flow=last_dims(2),
)
for _name, _aten in {
    "AvgPool2D": "avg_pool2d_backward",
    "AdaptiveAvgPool2D": "_adaptive_avg_pool2d_backward",
    "MaxPool2DWithIndices": "max_pool2d_with_indices_backward",
    "UpsampleNearest2D": "upsample_nearest2d_backward",
    "UpsampleNearestExact2D": "_upsample_nearest_exact2d_backward",
}.items():
    op(_name, flow=last_dims(2), aten=(Aten(f"{_aten}.default", ("grad_output",)),))
op(
    "ReflectionPad3D ReplicationPad3D UpsampleTrilinear3D UpsampleNearest3D UpsampleNearestExact3D AvgPool3D"
    " AdaptiveAvgPool3D AdaptiveMaxPool3D MaxPool3DWithIndices FractionalMaxPool3D MaxUnpool3D MkldnnMaxPool3D"
    " PixelShuffle PixelUnshuffle",
    flow=last_dims(3),
)
op("GridSampler2D CudnnGridSampler", flow={0: batches(4), 1: batches(4)})
op("GridSampler3D", flow={0: batches(5), 1: batches(5)})
op("AffineGridGenerator", flow=batches(3))
op("Im2Col", flow=batches(4))
op("Col2Im", flow=batches(3))
op("ChannelShuffle", flow=batches())
