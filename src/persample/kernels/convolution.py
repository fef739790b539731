"""Per-sample weight gradients of convolutions.

With stride s, dilation δ and a zero-padded input x, a convolution is

    y[o, t] = Σ_ik  w[o, i, k] · x[i, s·t + δ·k]

(t and k are multi-indices over the spatial dims; o and i lie in the same group), so one sample's gradient is

    dw[o, i, k] = Σ_t  dy[o, t] · x[i, s·t + δ·k]                                                     (1)

A transposed convolution scatters where this one gathers, y[o, s·t + δ·k] += w[i, o, k] · x[i, t], hence

    dw[i, o, k] = Σ_t  x[i, t] · dy[o, s·t + δ·k]

which is (1) with x and dy exchanged. So every kernel below computes (1) and nothing else. Where a sample owns
R images, t also runs over them: R is one more spatial dim, in which the kernel has size 1.

Letters: B samples, R images of a sample, G groups, p and d output and input channels of *one group*,
K offsets in the kernel, T output positions of a sample (over all its images).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from persample.kernels.conv_select import CACHE_BYTES, Geometry, applicable, choose

__all__ = ["KERNELS", "Geometry", "as_matrices", "choose", "convolve", "weight_per_sample", "weight_summed"]


def weight_per_sample(
    x: Tensor,
    dy: Tensor,
    weight_size: Sequence[int],
    geometry: Geometry,
    *,
    out: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Formula (1) for every sample: x (B, R, Cin, *S) and dy (B, R, Cout, *O) give (B, *weight_size).

    `weight_size` is as PyTorch stores it: (Cout, Cin/G, *k), or (Cin, Cout/G, *k) if transposed. x and dy may
    have any strides. Padding modes other than zeros arrive as an x that is already padded. With B = 0 the
    result is empty, with R = 0 it is zero. `out` is written and returned; `kernel` overrides `choose`.

    >>> x, dy = torch.ones(2, 1, 3, 5), torch.ones(2, 1, 4, 3)
    >>> geometry = Geometry((1,), (0,), (1,), transposed=False, output_padding=(0,), groups=1)
    >>> weight_per_sample(x, dy, (4, 3, 3), geometry).shape
    torch.Size([2, 4, 3, 3])
    """
    shape, dtype = (x.shape[0], *weight_size), _working_dtype(x)
    if out is not None and out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the per-sample gradients have {shape}")
    name = kernel or choose(x.shape[0], x.shape[1], weight_size, x.shape[3:], dy.shape[3:], geometry, dtype)
    if name not in applicable(weight_size, geometry):
        raise ValueError(f"kernel {name!r} cannot do this; choose from {applicable(weight_size, geometry)}")
    if geometry.transposed:
        x, dy = dy, x
        geometry = replace(geometry, transposed=False, output_padding=(0,) * len(geometry.stride))
    with torch.no_grad():
        if not x.numel() or not dy.numel():
            return x.new_zeros(shape) if out is None else out.zero_()
        direct = out is not None and out.is_contiguous() and out.dtype == dtype
        target = out if out is not None and direct else x.new_empty(shape, dtype=dtype)
        result = KERNELS[name](x.to(dtype), dy.to(dtype), target, geometry)
        if out is None:
            return result.to(x.dtype)
        return out if result is out else out.copy_(result)


def weight_summed(x: Tensor, dy: Tensor, weight_size: Sequence[int], geometry: Geometry) -> Tensor:
    """Formula (1) summed over all samples: the ordinary gradient of the weight."""
    if not x.numel() or not dy.numel():
        return x.new_zeros(tuple(weight_size))
    return _library_gradient(x.flatten(0, 1), dy.flatten(0, 1), x.new_empty(tuple(weight_size)), geometry)


def convolve(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The convolution itself, of x (B, R, Cin, *S)."""
    y: Tensor = torch.ops.aten.convolution(x.flatten(0, 1), weight, None, *geometry.arguments)
    return y.view(*x.shape[:2], *y.shape[1:])


def as_matrices(x: Tensor, dy: Tensor, weight_size: Sequence[int], geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Formula (1) as a product: cotangents (B·G, T, p) and patches (B·G, T, d·K)."""
    if geometry.transposed:
        x, dy, geometry = dy, x, replace(geometry, transposed=False)
    rows, kernel = len(x) * geometry.groups, weight_size[2:]
    patches = _windows(_fit(x, kernel, dy.shape[3:], geometry), kernel, geometry)
    return _matrices(dy, rows).mT, patches.reshape(rows, math.prod(weight_size[1:]), -1).mT


def _library_gradient(x: Tensor, dy: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """PyTorch's weight gradient of images x (N, Cin, *S); of ``weight`` only the shape is read."""
    only_weight = (False, True, False)
    grad: Tensor = torch.ops.aten.convolution_backward(dy, x, weight, None, *geometry.arguments, only_weight)[1]
    return grad


def _library(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """(1) by PyTorch's own weight gradient. It sums over a batch, not over groups: samples become groups."""
    kernel, space = out.shape[3:], dy.shape[3:]
    if geometry.output_size(x.shape[3:], kernel) != tuple(space):  # a large output_padding, roles exchanged
        x = _fit(x, kernel, space, geometry)
        geometry = replace(geometry, padding=(0,) * len(kernel))
    folded = replace(geometry, groups=len(out) * geometry.groups)
    x, dy = (t.transpose(0, 1).flatten(1, 2) for t in (x, dy))
    return _library_gradient(x, dy, out.flatten(0, 1), folded).view(out.shape)


def _pointwise(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """dw = dy @ xᵀ over positions: (1) with K = 1, on every s-th element of x."""
    x = _fit(x, out.shape[3:], dy.shape[3:], geometry)
    for axis, stride in enumerate(geometry.stride, start=3):
        x = x.unfold(axis, 1, stride).squeeze(-1)
    rows = len(out) * geometry.groups
    torch.bmm(_matrices(dy, rows), _matrices(x, rows).mT, out=out.view(rows, -1, out.shape[2]))
    return out


def _unfold(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """dw = dy @ patchesᵀ with patches[(i, k), t] = x[i, s·t + δ·k] written out: a GEMM per sample and group.

    The patches are K times the input. They are built for a few samples at a time, in one buffer that stays in
    cache: a fresh buffer for the whole batch can cost more in page faults than all the arithmetic.
    """
    kernel, space = out.shape[3:], dy.shape[3:]
    size = (x.shape[2], *kernel, x.shape[1], *space)
    step = _samples_per_step(math.prod(size), x)
    buffer = x.new_empty(step, *size)
    for some in _steps(len(out), step):
        x_, dy_, out_ = x[some], dy[some], out[some]
        patches = buffer[: len(x_)].copy_(_windows(_fit(x_, kernel, space, geometry), kernel, geometry))
        rows, columns = len(x_) * geometry.groups, out[0, 0].numel()
        target = out_.view(rows, -1, columns)
        torch.bmm(_matrices(dy_, rows), patches.view(rows, columns, -1).mT, out=target)
    return out


def _shifted(x: Tensor, dy: Tensor, out: Tensor, geometry: Geometry) -> Tensor:
    """dw[:, :, k] = dy @ x[:, flat(δ·k):]ᵀ: (1) at stride 1 as K GEMMs on views of x, with no patches.

    flat is the row-major position in the padded image. It is linear, flat(t + δ·k) = flat(t) + flat(δ·k), so
    once dy is written into rows as long as those of x, zeros at their ends, offset k is a slice of flat x.
    """
    kernel, space = out.shape[3:], dy.shape[3:]
    image = geometry.read_size(space, kernel)
    steps = [math.prod(image[axis + 1 :]) for axis in range(len(image))]  # flat(one step along the axis)
    offsets = [
        sum(k * dilation * step for k, dilation, step in zip(index, geometry.dilation, steps, strict=True))
        for index in itertools.product(*map(range, kernel))
    ]
    length = (dy.shape[1] - 1) * math.prod(image) + 1  # up to the last position of the last image
    length += sum((size - 1) * step for size, step in zip(space, steps, strict=True))
    row_ends = [pad for size, full in zip(space[::-1], image[::-1], strict=True) for pad in (0, full - size)]
    step = _samples_per_step(out[0].numel(), out)
    p, d = out.shape[1] // geometry.groups, out.shape[2]
    parts = out.new_empty(len(offsets), step * geometry.groups, p, d)
    for some in _steps(len(out), step):
        rows = len(out[some]) * geometry.groups
        flat_x = _matrices(_fit(x[some], kernel, space, geometry), rows)
        flat_dy = _matrices(F.pad(dy[some], row_ends), rows)[..., :length]
        for part, offset in zip(parts, offsets, strict=True):
            torch.bmm(flat_dy, flat_x[..., offset : offset + length].mT, out=part[:rows])
        out[some].view(rows, p, d, -1).copy_(parts[:, :rows].permute(1, 2, 3, 0))
    return out


def _fit(x: Tensor, kernel: Sequence[int], space: Sequence[int], geometry: Geometry) -> Tensor:
    """Zero-pad x, and crop it at the far ends, to exactly the elements that (1) reads."""
    pads: list[int] = []
    needs = geometry.read_size(space, kernel)
    for have, need, padding in zip(x.shape[3:], needs, geometry.padding, strict=True):
        pads = [padding, need - have - padding, *pads]  # F.pad counts dims from the last one
    return F.pad(x, pads) if any(pads) else x


def _windows(x: Tensor, kernel: Sequence[int], geometry: Geometry) -> Tensor:
    """The view (B, Cin, *k, R, *O) of x (B, R, Cin, *S) that has x[b, r, i, s·t + δ·k] at [b, i, k, r, t]."""
    n, windows = len(kernel), x.transpose(1, 2)
    for axis in range(n):
        span = geometry.dilation[axis] * (kernel[axis] - 1) + 1
        windows = windows.unfold(3 + axis, span, geometry.stride[axis])[..., :: geometry.dilation[axis]]
    return windows.movedim(tuple(range(3 + n, 3 + 2 * n)), tuple(range(2, 2 + n)))


def _matrices(x: Tensor, rows: int) -> Tensor:
    """(B, R, C, *S) as the matrices (B·G, C/G, R·S) of a batched GEMM with `rows` = B·G."""
    return x.transpose(1, 2).reshape(rows, x.shape[0] * x.shape[2] // rows, -1)


def _steps(samples: int, step: int) -> Iterator[slice]:
    """The batch in slices of `step` samples."""
    return (slice(start, start + step) for start in range(0, samples, step))


def _samples_per_step(elements: int, x: Tensor) -> int:
    """How many samples' temporaries to hold at once: what the cores' caches hold, one per core at least."""
    workers, budget = (torch.get_num_threads(), CACHE_BYTES) if x.device.type == "cpu" else (1, 2**28)
    return min(len(x), workers * max(1, budget // (elements * x.element_size())))


def _working_dtype(x: Tensor) -> torch.dtype:
    """Half precision goes through float32 on a CPU: 3 to 8 times faster where it has no bfloat16 GEMM."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if half and x.device.type == "cpu" else x.dtype


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Geometry], Tensor]] = {
    "library": _library,
    "pointwise": _pointwise,
    "unfold": _unfold,
    "shifted": _shifted,
}
