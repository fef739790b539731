"""Convolutions: weight and bias."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from ...factors import Convolution, Dense, Factor, Outer, View
from ...factors.rearrange import Reshape
from ...kernels.convolution import Geometry
from ...kernels.norms import wide
from ..layout import Flow, Outcome, Shape, sample_dims
from ..read.site import Site
from .dims import by_letters, keep, leading, only
from .table import Aten, Layouts, Rowwise, op
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
        of_images = g.sum(tuple(range(2, g.ndim)), dtype=wide(g.dtype))
        return Dense(samples.sum(of_images).to(g.dtype))
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
    return samples.factor([x, g], lambda ts: Convolution(ts[0], ts[1], use.target, geometry))


def _per_dim(use: Use, name: str) -> tuple[int, ...]:
    """One number per spatial dim; a single saved one (padding="valid" does that) stands for all."""
    saved = use.site.numbers(name)
    return saved * (use.g.ndim - 2) if len(saved) == 1 else saved


def mixed_dims_tbc(site: Site) -> tuple[Shape, Shape]:
    """All channels, and positions if a window has several."""
    return site.shapes[0], (0, 2) if site.target_or_saved(1, "weight")[0] > 1 else (2,)


def constants_of_tbc(node: Node, shape: Shape) -> list[int]:
    """A constant sequence brings positions and batch along, a constant weight channels, whatever sizes coincide."""
    x, weight = (node.next_functions[k][0] for k in (0, 1))
    return [*([0, 1] if x is None else []), *([2] if weight is None else [])]


def conv_tbc(use: Use) -> Factor | None:
    """Windows of the sequence and cotangents, position by position: dW[b] is the sum of their outer products."""
    site, g, rows = use.site, use.g, use.rows(2)
    if rows is None or use.k == 0 or g.is_complex():
        return None
    g = g.flatten(0, 1)
    if use.k == 2:
        return rows.written_out([g], lambda sides: sides[0].sum(1))
    pad, length = site.number("pad"), use.target[0]
    windows = F.pad(site.tensor("self"), (0, 0, 0, 0, pad, pad)).unfold(0, length, 1)  # (T, B, C, length)

    def weight(sides: list[Tensor]) -> Factor:
        flat = Outer(sides[0], sides[1])
        return View(flat, use.target, Reshape(flat.shape, use.target))

    return rows.factor([windows.mT.flatten(2).flatten(0, 1), g], weight)


FLOW = {0: images, 1: shared_by_images, 2: shared_by_images}
_op = partial(op, flow=FLOW, convolution=True, mixed_dims=mixed_dims)

_op(
    "Convolution",
    rule=convolution,
    aten=(Aten("convolution_backward.default", ("grad_output",), None),),
    rowwise=Rowwise(
        {1: ("input",), 2: ("input",)}, ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    ),
    saved_data=("input", 1),
)
_op("MkldnnConvolution CudnnConvolution ConvolutionOverrideable SlowConvDilated2D SlowConvDilated3D")
op(
    "ConvTbc",
    flow=by_letters("tbo", {0: "sbc", 1: "kco", 2: "o"}),  # s: a position of the sequence is in several windows
    rule=conv_tbc,
    mixed_dims=mixed_dims_tbc,
    new_rows=constants_of_tbc,
)
