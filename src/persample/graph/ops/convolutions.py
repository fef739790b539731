"""Convolutions: weight and bias."""

from __future__ import annotations

from functools import partial

from ...factors import Convolution, Dense, Factor
from ...kernels.convolution import Geometry
from ..layout import Flow, Outcome, Shape, sample_dims
from ..read.site import Site
from .dims import keep, leading, only
from .table import Layouts, Rowwise, op
from .use import Use


def images(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Dim 0 counts the images, and stays."""
    shape = site.shapes[0]
    return keep(only(layouts), shape, site.target(k), leading(shape, 1))


def shared_by_images(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Weight and bias, or scale and shift, are shared by all images."""
    return Flow.SHARED if sample_dims(only(layouts), site.shapes[0]) == (0,) else Flow.PROBE


def by_group(shape: Shape, groups: int) -> Shape:
    """(N, C, ...) as (N, G, C / G, ...)."""
    return (shape[0], groups, shape[1] // max(groups, 1), *shape[2:])


def mixed_dims(site: Site) -> tuple[Shape, Shape]:
    """Channels of a group, and the dims along which the kernel slides."""
    kernel, groups = site.target_or_saved(1, "weight")[2:], site.number("groups") if site.has("groups") else 1
    sliding = [d + 3 for d, size in enumerate(kernel) if size > 1]
    return by_group(site.shapes[0], groups), (2, *sliding)


def convolution(use: Use) -> Factor | None:
    """Images (dim 0) grouped by sample; the weight's gradient stays a pair of inputs and cotangents."""
    site, g = use.site, use.g
    samples = use.rows(1)
    if samples is None or g.is_complex():
        return None
    if use.k == 2:
        return Dense(samples.sum(g.sum(tuple(range(2, g.ndim)))))
    geometry = Geometry(
        stride=_per_dim(use, "stride"),
        padding=_per_dim(use, "padding"),
        dilation=_per_dim(use, "dilation"),
        transposed=bool(site.value("transposed")),
        output_padding=_per_dim(use, "output_padding"),
        groups=site.number("groups"),
    )
    x = site.tensor("input")
    if use.k != 1 or x.dtype != g.dtype:
        return None
    return Convolution(samples.group(x), samples.group(g), use.target, geometry)


def _per_dim(use: Use, name: str) -> tuple[int, ...]:
    """One number per spatial dim; a single saved one (padding="valid" does that) stands for all."""
    saved = use.site.numbers(name)
    return saved * (use.g.ndim - 2) if len(saved) == 1 else saved


FLOW = {0: images, 1: shared_by_images, 2: shared_by_images}
_op = partial(op, flow=FLOW, convolution=True, mixed_dims=mixed_dims)

_op(
    "Convolution",
    rule=convolution,
    rowwise=Rowwise(
        {1: ("input",), 2: ("input",)}, ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    ),
    saved_data=("input", 1),
)
_op("MkldnnConvolution CudnnConvolution ConvolutionOverrideable SlowConvDilated2D SlowConvDilated3D")
