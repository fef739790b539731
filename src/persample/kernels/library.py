"""PyTorch's own kernels, called below autograd: the one module that names them.

Autograd's formulas prepare what they pass to some of these: tensors without gaps, in the order of their dims, with no
conjugation or sign left to be done. A kernel that is called without that may read past its tensors, or leave its result
unwritten. So nothing gets to a kernel from here but through `plain`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from persample.kernels.conv_geometry import Geometry

__all__ = ["convolution", "distance_gradient", "group_norm_sums", "input_gradient", "plain", "weight_gradient"]

_aten = torch.ops.aten


def plain(t: Tensor) -> Tensor:
    """The same numbers, as they are, one after another in memory; itself where they are so already."""
    return t.resolve_conj().resolve_neg().contiguous()


def _image(t: Tensor) -> Tensor:
    """The same, but images whose channels come last in memory are left so: convolutions have kernels for them."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.ndim)
    t = t.resolve_conj().resolve_neg()
    in_order = t.is_contiguous() or t.dtype == torch.float64  # for which PyTorch's kernel refuses the other order
    if last is not None and not in_order and t.is_contiguous(memory_format=last):
        return t
    return t.contiguous().view(-1).view(t.shape)  # dims of one element may have strides of either order


def convolution(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The convolution of images x (N, Cin, *S), transposed or not."""
    y: Tensor = _aten.convolution(_image(x), _image(weight), None, *geometry.arguments)
    return y


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The weight gradient of images x (N, Cin, *S), summed over them; of ``weight`` only the shape is read."""
    only = (False, True, False)
    grad: Tensor = _aten.convolution_backward(_image(dy), _image(x), weight, None, *geometry.arguments, only)[1]
    return grad


def input_gradient(dy: Tensor, weight: Tensor, input_size: Sequence[int], geometry: Geometry) -> Tensor:
    """The gradient of an input of the given size."""
    x = dy.new_empty(1).expand(tuple(input_size))  # only its shape is read
    only = (True, False, False)
    grad: Tensor = _aten.convolution_backward(_image(dy), x, _image(weight), None, *geometry.arguments, only)[0]
    return grad


def group_norm_sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """(C,) each: Σ g · x̂ and Σ g over the positions of one image, for g and x (C, S), mean and rstd (G,)."""
    images = [plain(t).unsqueeze(0) for t in (g, x, mean, rstd)]
    about = 1, *g.shape, len(rstd)
    scale = torch.empty(len(g), dtype=g.dtype, device=g.device)  # only its presence is asked for
    found = _aten.native_group_norm_backward(*images, scale, *about, (False, True, True))
    return found[1], found[2]


def distance_gradient(g: Tensor, x: Tensor, y: Tensor, p: float, distances: Tensor) -> Tensor:
    """(B, n, d): the gradient of x (B, n, d), of the p-norm ``distances`` (B, n, m) to the rows of y (B, m, d)."""
    grad: Tensor = _aten._cdist_backward(plain(g), plain(x), plain(y), p, plain(distances))
    return grad
