"""The input of a convolution as formula (1) of `convolution` reads it: padded, in windows, as matrices.

An input is x (B, R, Cin, *S), not transposed; ``kernel`` is the kernel's size and ``out_size`` that of the output.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import Geometry

__all__ = [
    "CACHE_BYTES",
    "FEW_CHANNELS",
    "as_matrices",
    "matrices",
    "padded",
    "samples_per_step",
    "windows",
    "windows_along",
]

CACHE_BYTES = 2**21  # temporaries up to here are rewritten in place, without a trip to memory
FEW_CHANNELS = 4  # fewer than these; patches of more are copied faster with channels last


def padded(x: Tensor, kernel: Sequence[int], out_size: Sequence[int], geometry: Geometry) -> Tensor:
    """x with zeros around it, or cropped at the far ends: what (1) reads, no more and no less."""
    pads = _pads(x.shape[3:], kernel, out_size, geometry)
    if not any(pads[::2]) and max(pads, default=0) <= 0:  # a view will do
        return x[(..., *[slice(None, pad or None) for pad in pads[:0:-2]])] if any(pads) else x
    return F.pad(x, pads)


def _pads(size: Sequence[int], kernel: Sequence[int], out_size: Sequence[int], geometry: Geometry) -> list[int]:
    """Zeros before and after every axis, from the last one to the first, as `F.pad` takes them; less than 0 crops."""
    pads: list[int] = []
    for have, need, padding in zip(size, geometry.read_size(out_size, kernel), geometry.padding, strict=True):
        pads = [padding, need - have - padding, *pads]
    return pads


def windows(x: Tensor, kernel: Sequence[int], geometry: Geometry) -> Tensor:
    """The view (B, Cin, *k, R, *O) of a padded x that has x[b, r, i, s·t + δ·k] at [b, i, k, r, t]."""
    n, view = len(kernel), x.transpose(1, 2)
    for axis in range(n):
        view = windows_along(view, 3 + axis, kernel[axis], geometry.stride[axis], geometry.dilation[axis])
    return view.movedim(tuple(range(3 + n, 3 + 2 * n)), tuple(range(2, 2 + n)))


def windows_along(x: Tensor, dim: int, size: int, stride: int, dilation: int) -> Tensor:
    """The view with windows along one dim as a new last dim."""
    return x.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation]


def matrices(x: Tensor, rows: int) -> Tensor:
    """(B, R, C, *S) as the matrices (B·G, C/G, R·S) of a batched GEMM with ``rows`` = B·G."""
    return x.transpose(1, 2).reshape(rows, x.shape[0] * x.shape[2] // rows, -1)


def as_matrices(
    x: Tensor, dy: Tensor, weight_size: Sequence[int], geometry: Geometry, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Formula (1) as a product, up to the order of its columns: cotangents (B·G, T, p) and patches (B·G, T, d·K).

    The convolution may be transposed. The patches are written into the first part of ``out``, if it is given.
    """
    if geometry.transposed:
        x, dy, geometry = dy, x, replace(geometry, transposed=False)
    patches = _patches_by_position(x, weight_size[2:], dy.shape[3:], geometry, out)
    return matrices(dy, len(patches)).mT, patches


def _patches_by_position(
    x: Tensor, kernel: Sequence[int], out_size: Sequence[int], geometry: Geometry, out: Tensor | None
) -> Tensor:
    """(B·G, T, K·d) with x[b, r, i, s·t + δ·k] at [t, (k, i)], in the first part of ``out`` if it is given.

    Where there are several channels they come last: what a kernel reads of a line is then one run of memory.
    """
    n, groups = len(kernel), geometry.groups
    rows, channels, columns = len(x) * groups, x.shape[2] // groups, x.shape[2] // groups * math.prod(kernel)
    if channels < FEW_CHANNELS:
        view = windows(padded(x, kernel, out_size, geometry), kernel, geometry)
        return _written(view, out).view(rows, columns, -1).mT
    x = x.unflatten(2, (groups, -1)).permute(0, 2, 1, *range(4, 4 + n), 3)
    x = F.pad(x, [0, 0, *_pads(x.shape[3:-1], kernel, out_size, geometry)]).contiguous()
    for axis in range(n):
        x = windows_along(x, 3 + axis, kernel[axis], geometry.stride[axis], geometry.dilation[axis])
    return _written(x.movedim(3 + n, -1), out).view(rows, -1, columns)


def _written(view: Tensor, out: Tensor | None) -> Tensor:
    """A copy without gaps, in the first part of ``out`` if it is given."""
    if out is None:
        return view.contiguous()
    return out.flatten()[: view.numel()].view(view.shape).copy_(view)


def samples_per_step(elements: int, x: Tensor) -> int:
    """How many samples fit into caches with so many elements of temporaries each, but at least one for each core."""
    workers, budget = (torch.get_num_threads(), CACHE_BYTES) if x.device.type == "cpu" else (1, 2**28)
    return min(len(x), workers * max(1, budget // (elements * x.element_size())))
