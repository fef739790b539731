"""Formula (1) of `convolution` for every sample, by the kernel that suits it, or summed over all samples."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..differentiable import grad_mode, is_differentiable
from ..geometry import Geometry
from ..library import convolution, weight_gradient
from .choice import applicable, choose, is_measuring, measure
from .kernels import KERNELS, differentiable_gradients
from .sizes import Sizes, working_dtype

__all__ = ["chosen_kernel", "convolve", "weight_per_sample", "weight_summed"]


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

    >>> import torch
    >>> x, dy = torch.ones(2, 1, 3, 5), torch.ones(2, 1, 4, 3)
    >>> geometry = Geometry((1,), (0,), (1,), transposed=False, output_padding=(0,), groups=1)
    >>> weight_per_sample(x, dy, (4, 3, 3), geometry).shape
    torch.Size([2, 4, 3, 3])
    """
    shape, dtype = (x.shape[0], *weight_size), working_dtype(x)
    if out is not None and out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the per-sample gradients have {shape}")
    name = kernel or chosen_kernel(x, dy, weight_size, geometry)
    if name not in applicable(weight_size):
        raise ValueError(f"kernel {name!r} cannot do this; choose from {applicable(weight_size)}")
    if geometry.transposed:
        x, dy = dy, x
        geometry = replace(geometry, transposed=False, output_padding=(0,) * len(geometry.stride))
    with grad_mode():
        if not x.numel() or not dy.numel():
            return x.new_zeros(shape) if out is None else out.zero_()
        if is_differentiable():
            result = differentiable_gradients(name, x.to(dtype), dy.to(dtype), shape, geometry).to(x.dtype)
            return result if out is None else out.copy_(result)
        fits = out is not None and out.is_contiguous() and out.dtype == dtype
        target = out if out is not None and fits else x.new_empty(shape, dtype=dtype)
        result = KERNELS[name](x.to(dtype), dy.to(dtype), target, geometry)
        if out is None:
            return result.to(x.dtype)
        return out if result is out else out.copy_(result)


def chosen_kernel(x: Tensor, dy: Tensor, weight_size: Sequence[int], geometry: Geometry) -> str:
    """The kernel that `weight_per_sample` runs on these, which is timed first inside ``use_kernel("measured")``."""
    sizes = Sizes.of(x, dy, weight_size, geometry)
    if is_measuring() and x.numel() and dy.numel():
        return measure(sizes, lambda name: weight_per_sample(x, dy, weight_size, geometry, kernel=name))
    return choose(sizes)


def weight_summed(x: Tensor, dy: Tensor, weight_size: Sequence[int], geometry: Geometry) -> Tensor:
    """Formula (1) summed over all samples: the ordinary gradient of the weight."""
    if not x.numel() or not dy.numel():
        return x.new_zeros(tuple(weight_size))
    return weight_gradient(x.flatten(0, 1), dy.flatten(0, 1), x.new_empty(tuple(weight_size)), geometry)


def convolve(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The convolution itself, of x (B, R, Cin, *S)."""
    y = convolution(x.flatten(0, 1), weight, geometry)
    return y.view(*x.shape[:2], *y.shape[1:])
