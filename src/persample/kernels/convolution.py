"""Per-sample weight gradients of convolutions.

With stride s, dilation δ and a zero-padded input x, a convolution is

    y[o, t] = Σ_ik  w[o, i, k] · x[i, s·t + δ·k]

(t and k are multi-indices over the spatial dims; o and i lie in the same group), so one sample's gradient is

    dw[o, i, k] = Σ_t  dy[o, t] · x[i, s·t + δ·k]                                                     (1)

A transposed convolution scatters where this one gathers, y[o, s·t + δ·k] += w[i, o, k] · x[i, t], hence

    dw[i, o, k] = Σ_t  x[i, t] · dy[o, s·t + δ·k]

which is (1) with x and dy exchanged. So every kernel of `conv_kernels` computes (1) and nothing else. Where a sample
owns R images, t also runs over them: R is one more spatial dim, in which the kernel has size 1.

Letters: B samples, R images of a sample, G groups, p and d output and input channels of *one group*,
K offsets in the kernel, T output positions of a sample (over all its images).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from persample.kernels.conv_geometry import Geometry
from persample.kernels.conv_kernels import KERNELS, matrices, patches_by_position
from persample.kernels.conv_select import (
    Key,
    applicable,
    choose,
    choose_norms,
    explain_choice,
    is_measuring,
    keeps_stack,
    measure,
    use_costs,
    use_kernel,
)
from persample.kernels.library import convolution, weight_gradient

__all__ = [
    "KERNELS",
    "Geometry",
    "as_matrices",
    "choose",
    "choose_norms",
    "chosen_kernel",
    "convolve",
    "explain_choice",
    "keeps_stack",
    "key_of",
    "use_costs",
    "use_kernel",
    "weight_per_sample",
    "weight_summed",
]


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
    name = kernel or chosen_kernel(x, dy, weight_size, geometry)
    if name not in applicable(weight_size):
        raise ValueError(f"kernel {name!r} cannot do this; choose from {applicable(weight_size)}")
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


def key_of(x: Tensor, dy: Tensor, weight_size: Sequence[int], geometry: Geometry) -> Key:
    """What choices go by."""
    return (
        *x.shape[:2],
        tuple(weight_size),
        tuple(x.shape[3:]),
        tuple(dy.shape[3:]),
        geometry,
        _working_dtype(x),
    )


def chosen_kernel(x: Tensor, dy: Tensor, weight_size: Sequence[int], geometry: Geometry) -> str:
    """The kernel that `weight_per_sample` takes for these."""
    key = key_of(x, dy, weight_size, geometry)
    if is_measuring() and x.numel() and dy.numel():
        return measure(key, lambda name: weight_per_sample(x, dy, weight_size, geometry, kernel=name))
    return choose(*key)


def weight_summed(x: Tensor, dy: Tensor, weight_size: Sequence[int], geometry: Geometry) -> Tensor:
    """Formula (1) summed over all samples: the ordinary gradient of the weight."""
    if not x.numel() or not dy.numel():
        return x.new_zeros(tuple(weight_size))
    return weight_gradient(x.flatten(0, 1), dy.flatten(0, 1), x.new_empty(tuple(weight_size)), geometry)


def convolve(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The convolution itself, of x (B, R, Cin, *S)."""
    y = convolution(x.flatten(0, 1), weight, geometry)
    return y.view(*x.shape[:2], *y.shape[1:])


def as_matrices(
    x: Tensor, dy: Tensor, weight_size: Sequence[int], geometry: Geometry, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Formula (1) as a product, up to the order of its columns: cotangents (B·G, T, p) and patches (B·G, T, d·K).

    The patches are written into ``out``, if that is given.
    """
    if geometry.transposed:
        x, dy, geometry = dy, x, replace(geometry, transposed=False)
    patches = patches_by_position(x, weight_size[2:], dy.shape[3:], geometry, out)
    return matrices(dy, len(patches)).mT, patches


def _working_dtype(x: Tensor) -> torch.dtype:
    """Half precision goes through float32 on a CPU: 3 to 8 times faster where it has no bfloat16 GEMM."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if half and x.device.type == "cpu" else x.dtype
