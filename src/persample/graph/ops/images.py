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


def _images(mixed: int, names: str, written: str = "") -> None:
    """Enter ops on the last dims; those of which compiled regions call the backward by its name are ``written``."""
    op(names, flow=last_dims(mixed))
    for pair in written.split():
        name, aten = pair.split(":")
        op(name, flow=last_dims(mixed), aten=(Aten(f"{aten}_backward.default", ("grad_output",)),))


_images(
    1,
    "UpsampleLinear1D UpsampleNearest1D UpsampleNearestExact1D",
    "ReflectionPad1D:reflection_pad1d ReplicationPad1D:replication_pad1d",
)
_images(
    2,
    "UpsampleBilinear2D UpsampleBicubic2D UpsampleBicubic2DAa AdaptiveMaxPool2D MaxPool2D FractionalMaxPool2D"
    " MaxUnpool2D MkldnnMaxPool2D MkldnnAdaptiveAvgPool2D",
    "ReflectionPad2D:reflection_pad2d ReplicationPad2D:replication_pad2d AvgPool2D:avg_pool2d"
    " AdaptiveAvgPool2D:_adaptive_avg_pool2d MaxPool2DWithIndices:max_pool2d_with_indices"
    " UpsampleNearest2D:upsample_nearest2d UpsampleNearestExact2D:_upsample_nearest_exact2d"
    " UpsampleBilinear2DAa:_upsample_bilinear2d_aa",
)
_images(
    3,
    "UpsampleTrilinear3D UpsampleNearest3D UpsampleNearestExact3D AdaptiveMaxPool3D FractionalMaxPool3D MaxUnpool3D"
    " MkldnnMaxPool3D PixelShuffle PixelUnshuffle",
    "ReflectionPad3D:reflection_pad3d ReplicationPad3D:replication_pad3d AvgPool3D:avg_pool3d"
    " AdaptiveAvgPool3D:_adaptive_avg_pool3d MaxPool3DWithIndices:max_pool3d_with_indices",
)
op(
    "GridSampler2D",
    flow={0: batches(4), 1: batches(4)},
    aten=(Aten("grid_sampler_2d_backward.default", ("grad_output",), None),),
)
op("CudnnGridSampler", flow={0: batches(4), 1: batches(4)})
op("GridSampler3D", flow={0: batches(5), 1: batches(5)})
op("AffineGridGenerator", flow=batches(3))
op("Im2Col", flow=batches(4))
op("Col2Im", flow=batches(3))
op("ChannelShuffle", flow=batches())
