"""The ways to compute formula (1) of `convolution`: from x (B, R, Cin, *S) and dy (B, R, Cout, *O), not transposed.

Each kernel fills ``out`` (B, Cout, Cin/G, *k), which is contiguous, or returns the result in memory of its own. Two of
them are convolutions of the library's. The others are products of matrices: of dy, (p, T) for each sample and group,
with something made from x. Letters are explained in `convolution`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from persample.kernels.conv_geometry import Geometry
from persample.kernels.library import convolution, weight_gradient

__all__ = [
    "CACHE_BYTES",
    "FEW_CHANNELS",
    "KERNELS",
    "SHORT_RUN",
    "fit",
    "matrices",
    "patches_by_position",
    "samples_per_step",
    "unfolded",
]

CACHE_BYTES = 2**21  # temporaries up to here are rewritten in place, without a trip to memory
_FRESH = 2**22  # bytes; a larger block may be new pages every time
_VECTOR, _FEW_COLUMNS = 8, 64
FEW_CHANNELS = 4
SHORT_RUN = 5  # shorter ones are copied faster one element of each at a time


def _library(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """(1) by PyTorch's own weight gradient. It sums over a batch, not over groups: samples become groups.

    Its result is in memory of its own: a few samples at a time if that would be fresh pages.
    """
    kernel, space = out.shape[3:], dy.shape[3:]
    if geometry.output_size(x.shape[3:], kernel) != tuple(space):  # a large output_padding, roles exchanged
        x = fit(x, kernel, space, geometry)
        geometry = replace(geometry, padding=(0,) * len(kernel))
    portions = -(-out.nbytes // _FRESH) if x.device.type == "cpu" else 1
    if portions == 1:
        return _folded(x, dy, out, geometry)
    for some in _steps(len(out), -(-len(out) // portions)):
        out[some] = _folded(x[some], dy[some], out[some], geometry)
    return out


def _folded(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """`_library` for samples that are done at once."""
    folded = replace(geometry, groups=len(out) * geometry.groups)
    x, dy = (t.transpose(0, 1).flatten(1, 2) for t in (x, dy))
    return weight_gradient(x, dy, out.flatten(0, 1), folded).view(out.shape)


def _pointwise(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """dw = dy @ xᵀ over positions: (1) with K = 1, on every s-th element of x."""
    x = fit(x, out.shape[3:], dy.shape[3:], geometry)
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
    kernel, space = out.shape[3:], dy.shape[3:]
    size = (x.shape[2], *kernel, x.shape[1], *space)
    step = samples_per_step(math.prod(size), x)
    buffer = x.new_empty(step, *size)
    for some in _steps(len(out), step):
        x_, dy_, out_ = x[some], dy[some], out[some]
        x_ = fit(x_, kernel, space, geometry).contiguous()  # it is read K times
        patches = buffer[: len(x_)].copy_(windows(x_, kernel, geometry))
        rows, columns = len(x_) * geometry.groups, out[0, 0].numel()
        _multiply(matrices(dy_, rows), patches.view(rows, columns, -1), out_.view(rows, -1, columns))
    return out


def _shifted(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """(1) as a GEMM for each place k of the kernel on the first axis: dw[:, :, k] = dy @ lines[:, δ·k:]ᵀ.

    The lines are the patches of a kernel that has size 1 on the first axis, at all positions of x on it. In memory
    the first axis is the outermost of the positions, so that all t at offset k are a slice: a view. With a stride
    s on that axis its positions are kept in s phases, s·l + φ at [φ, l]: one GEMM for the offsets k = s·l + φ of an l.
    """
    kernel, space = out.shape[3:], dy.shape[3:]
    phases, groups, p, d = geometry.stride[0], geometry.groups, out.shape[1] // geometry.groups, out.shape[2]
    if phases > 1 and geometry.dilation[0] > 1:  # offsets do not lie in phases one after another
        return _unfold(x, dy, out, geometry)
    rest, line = phases * math.prod(kernel[1:]), dy[0, :, 0, 0].numel()
    length = -(-geometry.read_size(space, kernel)[0] // phases)
    size = (x.shape[2], phases, *kernel[1:], length, x.shape[1], *space[1:])
    step = samples_per_step(max(math.prod(size), out[0].numel()), x)
    buffer, parts = x.new_empty(step, *size), x.new_empty(-(-kernel[0] // phases), step * groups, p, d * rest)
    for some in _steps(len(out), step):
        rows = len(out[some]) * groups
        lines = _lines(x[some], kernel, space, geometry)
        if not lines.is_contiguous():
            lines = buffer[: len(lines)].copy_(lines)
        lines = lines.view(rows, d * rest, -1)
        flat_dy = dy[some].movedim(1, 3).reshape(rows, p, -1)
        for k, part in enumerate(parts):
            shifted = lines[:, :, k * geometry.dilation[0] * line :][..., : flat_dy.shape[2]]
            _multiply(flat_dy, shifted, part[:rows])
        _gather(parts[:, :rows].view(len(parts), -1, rest), out[some].view(-1, out[0, 0, 0].numel()))
    return out


def _forward(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """(1) as a convolution of x with dy: strides and dilations change places, images are channels, samples are groups.

    For one input channel in each group, as a convolution adds up all channels.
    """
    none = (0,) * (out.ndim - 3)
    x = fit(x, out.shape[3:], dy.shape[3:], geometry)
    images, filters = (t.transpose(1, 2).flatten(0, 1) for t in (x, dy))  # (B·G, R, *S) and (B·G·p, R, *O)
    exchanged = Geometry(geometry.dilation, none, geometry.stride, False, none, len(images))
    return convolution(images.flatten(0, 1).unsqueeze(0), filters, exchanged).view(out.shape)


def _multiply(dy: Tensor, right: Tensor, out: Tensor) -> None:
    """out = dy @ rightᵀ, for matrices (N, p, T) and (N, n, T); short rows are faster in whole vectors."""
    p, n = out.shape[1:]
    if n % _VECTOR and n < _FEW_COLUMNS and p % _VECTOR == 0 and p > _VECTOR:
        out.copy_(torch.bmm(right, dy.mT).mT)
    else:
        torch.bmm(dy, right.mT, out=out)


def _lines(x: Tensor, kernel: Sequence[int], space: Sequence[int], geometry: Geometry) -> Tensor:
    """A view (B, Cin, s, *k[1:], L, R, *O[1:]) that has x[b, r, i, (s·l + φ, …)] at [b, i, φ, k, l, r, t]."""
    n, phases = len(kernel), geometry.stride[0]
    x = fit(x, kernel, space, geometry, multiple=phases).contiguous()
    x = x.movedim(1, 2).unflatten(3, (-1, phases))
    for axis in range(1, n):
        x = unfolded(x, 4 + axis, kernel[axis], geometry.stride[axis], geometry.dilation[axis])
    return x.permute(0, 1, 4, *range(4 + n, 3 + 2 * n), 3, 2, *range(5, 4 + n))


def _gather(parts: Tensor, out: Tensor) -> None:
    """out[i, k·r + j] = parts[k, i, j] for parts (·, ·, r)."""
    run = parts.shape[2]
    for part, here in zip(parts, out.split(run, dim=1), strict=True):
        if run >= SHORT_RUN:
            here.copy_(part[:, : here.shape[1]])
            continue
        for j in range(here.shape[1]):
            here[:, j] = part[:, j]


def fit(x: Tensor, kernel: Sequence[int], space: Sequence[int], geometry: Geometry, multiple: int = 1) -> Tensor:
    """Zero-pad x, and crop it at the far ends, to what (1) reads; the first axis to a ``multiple``."""
    pads = _pads(x.shape[3:], kernel, space, geometry, multiple)
    return F.pad(x, pads) if any(pads) else x


def _pads(
    size: Sequence[int], kernel: Sequence[int], space: Sequence[int], geometry: Geometry, multiple: int = 1
) -> list[int]:
    """Zeros before and after every axis, from the last one to the first."""
    pads: list[int] = []
    first, *others = geometry.read_size(space, kernel)
    needs = (first + -first % multiple, *others)
    for have, need, padding in zip(size, needs, geometry.padding, strict=True):
        pads = [padding, need - have - padding, *pads]
    return pads


def patches_by_position(
    x: Tensor, kernel: Sequence[int], space: Sequence[int], geometry: Geometry, out: Tensor | None = None
) -> Tensor:
    """(B·G, T, K·d) with x[b, r, i, s·t + δ·k] at [t, (k, i)] for x (B, R, Cin, *S), in ``out`` if that is given.

    Where there are several channels they come last: what a kernel reads of a line is then one run of memory.
    """
    n, groups = len(kernel), geometry.groups
    rows, channels, columns = len(x) * groups, x.shape[2] // groups, x.shape[2] // groups * math.prod(kernel)
    if channels < FEW_CHANNELS:
        found = windows(fit(x, kernel, space, geometry), kernel, geometry)
        return _written(found, out).view(rows, columns, -1).mT
    x = x.unflatten(2, (groups, -1)).permute(0, 2, 1, *range(4, 4 + n), 3)
    x = F.pad(x, [0, 0, *_pads(x.shape[3:-1], kernel, space, geometry)]).contiguous()
    for axis in range(n):
        x = unfolded(x, 3 + axis, kernel[axis], geometry.stride[axis], geometry.dilation[axis])
    return _written(x.movedim(3 + n, -1), out).view(rows, -1, columns)


def _written(t: Tensor, out: Tensor | None) -> Tensor:
    """In memory without gaps: the first part of ``out``, or some of its own."""
    return t.contiguous() if out is None else out.flatten()[: t.numel()].view(t.shape).copy_(t)


def windows(x: Tensor, kernel: Sequence[int], geometry: Geometry) -> Tensor:
    """The view (B, Cin, *k, R, *O) of x (B, R, Cin, *S) that has x[b, r, i, s·t + δ·k] at [b, i, k, r, t]."""
    n, found = len(kernel), x.transpose(1, 2)
    for axis in range(n):
        found = unfolded(found, 3 + axis, kernel[axis], geometry.stride[axis], geometry.dilation[axis])
    return found.movedim(tuple(range(3 + n, 3 + 2 * n)), tuple(range(2, 2 + n)))


def unfolded(x: Tensor, axis: int, size: int, stride: int, dilation: int) -> Tensor:
    """The view with windows along an axis as a new last dim."""
    return x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]


def matrices(x: Tensor, rows: int) -> Tensor:
    """(B, R, C, *S) as the matrices (B·G, C/G, R·S) of a batched GEMM with `rows` = B·G."""
    return x.transpose(1, 2).reshape(rows, x.shape[0] * x.shape[2] // rows, -1)


def _steps(samples: int, step: int) -> Iterator[slice]:
    """The batch in slices of `step` samples."""
    return (slice(start, start + step) for start in range(0, samples, step))


def samples_per_step(elements: int, x: Tensor) -> int:
    """How many samples' temporaries to hold at once: what the cores' caches hold, one per core at least."""
    workers, budget = (torch.get_num_threads(), CACHE_BYTES) if x.device.type == "cpu" else (1, 2**28)
    return min(len(x), workers * max(1, budget // (elements * x.element_size())))


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Geometry], Tensor]] = {
    "library": _library,
    "pointwise": _pointwise,
    "unfold": _unfold,
    "shifted": _shifted,
    "forward": _forward,
}
