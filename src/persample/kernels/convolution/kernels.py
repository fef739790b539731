"""The ways to compute formula (1) of `convolution`: from x (B, R, Cin, *S) and dy (B, R, Cout, *O), not transposed.

Each kernel fills ``out`` (B, Cout, Cin/G, *k), which is contiguous, or returns the result in memory of its own. Two of
them are convolutions of the library's. The others are products of matrices: of dy, (p, T) for each sample and group,
with something made from x.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..differentiable import is_differentiable
from ..geometry import Geometry
from ..library import convolution, weight_gradient
from .patches import matrices, padded, samples_per_step, windows

__all__ = ["KERNELS", "differentiable_gradients"]

_FRESH_BYTES = 2**22  # a larger block may be new pages every time
_VECTOR, _FEW_COLUMNS = 8, 64  # elements; products of narrower matrices gain by rows of whole vectors


def _library(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """(1) by PyTorch's own weight gradient. It sums over a batch, not over groups: samples become groups.

    PyTorch allocates the result. Where that would take fresh pages, a few samples are done at a time, and copied.
    """
    kernel, out_size = out.shape[3:], dy.shape[3:]
    if geometry.output_size(x.shape[3:], kernel) != tuple(out_size):  # a large output_padding, roles exchanged
        x = padded(x, kernel, out_size, geometry)
        geometry = replace(geometry, padding=(0,) * len(kernel))
    portions = -(-out.nbytes // _FRESH_BYTES) if x.device.type == "cpu" and not is_differentiable() else 1
    if portions == 1:
        return _folded(x, dy, out, geometry)
    for some in _steps(len(out), -(-len(out) // portions)):
        out[some] = _folded(x[some], dy[some], out[some], geometry)
    return out


def _folded(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """PyTorch's weight gradient with each sample's groups as groups of its own."""
    folded = replace(geometry, groups=len(out) * geometry.groups)
    x, dy = (t.transpose(0, 1).flatten(1, 2) for t in (x, dy))
    return weight_gradient(x, dy, out.flatten(0, 1), folded).view(out.shape)


def _pointwise(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """dw = dy @ xᵀ over positions: (1) with K = 1, on every s-th element of x."""
    x = padded(x, out.shape[3:], dy.shape[3:], geometry)
    for axis, stride in enumerate(geometry.stride, start=3):
        x = x.unfold(axis, 1, stride).squeeze(-1)
    rows = len(out) * geometry.groups
    _multiply(matrices(dy, rows), matrices(x, rows), out.view(rows, -1, out.shape[2]))
    return out


def _unfold(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """dw = dy @ patchesᵀ with patches[(i, k), t] = x[i, s·t + δ·k] written out: a GEMM per sample and group.

    The patches are K times the input. They are built for a few samples at a time, in one buffer that stays in
    cache: a fresh buffer for the whole batch can cost more in page faults than all the arithmetic.
    """
    kernel, out_size = out.shape[3:], dy.shape[3:]
    size = (x.shape[2], *kernel, x.shape[1], *out_size)
    step = samples_per_step(math.prod(size), x)
    buffer = x.new_empty(step, *size)
    for some in _steps(len(out), step):
        x_, dy_, out_ = x[some], dy[some], out[some]
        x_ = padded(x_, kernel, out_size, geometry)
        x_ = x_.contiguous() if x.device.type == "cpu" else x_  # it is read K times
        patches = buffer[: len(x_)].copy_(windows(x_, kernel, geometry))
        rows, columns = len(x_) * geometry.groups, out[0, 0].numel()
        _multiply(matrices(dy_, rows), patches.view(rows, columns, -1), out_.view(rows, -1, columns))
    return out


def _forward(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """(1) as a convolution of x with dy: strides and dilations change places, images are channels, samples are groups.

    For one input channel in each group, as a convolution adds up all channels.
    """
    none = (0,) * (out.ndim - 3)
    x = padded(x, out.shape[3:], dy.shape[3:], geometry)
    images, filters = (t.transpose(1, 2).flatten(0, 1) for t in (x, dy))  # (B·G, R, *S) and (B·G·p, R, *O)
    exchanged = Geometry(geometry.dilation, none, geometry.stride, False, none, len(images))
    return convolution(images.flatten(0, 1).unsqueeze(0), filters, exchanged).view(out.shape)


def _multiply(dy: Tensor, right: Tensor, out: Tensor) -> None:
    """out = dy @ rightᵀ for dy (N, p, T) and right (N, n, T), transposed if p fills vectors and a small n does not."""
    p, n = out.shape[1:]
    if n % _VECTOR and n < _FEW_COLUMNS and p % _VECTOR == 0 and p > _VECTOR and out.device.type == "cpu":
        out.copy_(torch.bmm(right, dy.mT).mT)
    else:
        torch.bmm(dy, right.mT, out=out)


def differentiable_gradients(name: str, x: Tensor, dy: Tensor, shape: Sequence[int], geometry: Geometry) -> Tensor:
    """(1), of shape (B, Cout, Cin/G, *k), by the named kernel or what is like it, such that it can be differentiated.

    Nothing is written in place: those that write into ``out`` are one product of all patches.
    """
    if name in ("library", "forward"):
        return KERNELS[name](x, dy, x.new_empty(1).expand(*shape), geometry)
    rows = shape[0] * geometry.groups
    patches = _all_patches(x, shape[3:], dy.shape[3:], geometry).reshape(rows, math.prod(shape[2:]), -1)
    return torch.bmm(matrices(dy, rows), patches.mT).view(*shape)


def _all_patches(x: Tensor, kernel: Sequence[int], out_size: Sequence[int], geometry: Geometry) -> Tensor:
    """(B, Cin, *k, R, *O); of single images, by PyTorch's own function, whose backward is faster."""
    if (
        len(kernel) == 2
        and math.prod(kernel) > 1
        and x.shape[1] == 1
        and geometry.output_size(x.shape[3:], kernel) == tuple(out_size)
    ):
        return F.unfold(x.squeeze(1), tuple(kernel), geometry.dilation, geometry.padding, geometry.stride)
    return windows(padded(x, kernel, out_size, geometry), kernel, geometry)


def _steps(samples: int, step: int) -> Iterator[slice]:
    """The batch in slices of `step` samples."""
    return (slice(start, start + step) for start in range(0, samples, step))


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Geometry], Tensor]] = {
    "library": _library,
    "pointwise": _pointwise,
    "unfold": _unfold,
    "forward": _forward,
}
