"""Images: pooling, padding, resizing, shuffling and sampling."""

from __future__ import annotations

from functools import partial

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


def _by(name: str) -> tuple[Aten, ...]:
    """Compiled regions call its backward by this name."""
    return (Aten(name, ("grad_output",)),)


_signal, _image, _volume = (partial(op, flow=last_dims(dims)) for dims in (1, 2, 3))

_signal("UpsampleLinear1D UpsampleNearest1D UpsampleNearestExact1D")
_signal("ReflectionPad1D", aten=_by("reflection_pad1d_backward.default"))
_signal("ReplicationPad1D", aten=_by("replication_pad1d_backward.default"))
_image(
    "UpsampleBilinear2D UpsampleBicubic2D UpsampleBicubic2DAa AdaptiveMaxPool2D MaxPool2D FractionalMaxPool2D"
    " MaxUnpool2D MkldnnMaxPool2D MkldnnAdaptiveAvgPool2D"
)
_image("ReflectionPad2D", aten=_by("reflection_pad2d_backward.default"))
_image("ReplicationPad2D", aten=_by("replication_pad2d_backward.default"))
_image("AvgPool2D", aten=_by("avg_pool2d_backward.default"))
_image("AdaptiveAvgPool2D", aten=_by("_adaptive_avg_pool2d_backward.default"))
_image("MaxPool2DWithIndices", aten=_by("max_pool2d_with_indices_backward.default"))
_image("UpsampleNearest2D", aten=_by("upsample_nearest2d_backward.default"))
_image("UpsampleNearestExact2D", aten=_by("_upsample_nearest_exact2d_backward.default"))
_image("UpsampleBilinear2DAa", aten=_by("_upsample_bilinear2d_aa_backward.default"))
_volume(
    "UpsampleTrilinear3D UpsampleNearest3D UpsampleNearestExact3D AdaptiveMaxPool3D FractionalMaxPool3D MaxUnpool3D"
    " MkldnnMaxPool3D PixelShuffle PixelUnshuffle"
)
_volume("ReflectionPad3D", aten=_by("reflection_pad3d_backward.default"))
_volume("ReplicationPad3D", aten=_by("replication_pad3d_backward.default"))
_volume("AvgPool3D", aten=_by("avg_pool3d_backward.default"))
_volume("AdaptiveAvgPool3D", aten=_by("_adaptive_avg_pool3d_backward.default"))
_volume("MaxPool3DWithIndices", aten=_by("max_pool3d_with_indices_backward.default"))
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
