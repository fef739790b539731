"""PyTorch's own kernels, called below autograd: the one module that names them.

They hold for torch 2.13 to 2.15; ``tests/kernels/test_library.py`` checks what they are given.

Autograd's formulas prepare what they pass to some of these: tensors without gaps, in the order of their dims, with no
conjugation or sign left to be done. A kernel that is called without that may read past its tensors, or leave its result
unwritten. So nothing gets to a kernel from here but through `materialized`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .differentiable import is_differentiable
from .geometry import Geometry

__all__ = [
    "convolution",
    "copied_at_once",
    "distance_gradient",
    "end_to_end",
    "group_norm_sums",
    "gru_cell_gradient",
    "input_gradient",
    "is_fused_lstm_backward",
    "lays_out_fused_weights",
    "lstm_cell_gradient",
    "materialized",
    "weight_gradient",
]

_aten = torch.ops.aten


def materialized(t: Tensor) -> Tensor:
    """The tensor with its numbers in memory, conjugated and signed as they are, in the order of its dims.

    It is returned itself where that is so already.
    """
    return t.resolve_conj().resolve_neg().contiguous()


def _image(t: Tensor) -> Tensor:
    """`materialized` images, but channels that come last in memory are left there: convolutions have kernels for it."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.ndim)
    t = t.resolve_conj().resolve_neg()
    in_order = t.is_contiguous() or t.dtype == torch.float64  # for which PyTorch's kernel refuses the other order
    if last is not None and not in_order and t.is_contiguous(memory_format=last):
        return t
    return t.contiguous().view(-1).view(t.shape)  # dims of one element may have strides of either order


def is_fused_lstm_backward(kernel: object) -> bool:
    """Is this the backward of one layer of the CPU's fused LSTM?"""
    return kernel is _aten.mkldnn_rnn_layer_backward.default


def lays_out_fused_weights(function: object) -> bool:
    """Does this function copy the weights of a recurrent module into one block of memory, as cuDNN takes them?"""
    return getattr(function, "__name__", "") == "_cudnn_rnn_flatten_weight"


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
    """(C,) each: Σ g · x̂ and Σ g over the positions of one image, for g and x (C, S), mean and rstd (G,).

    x̂ is x normalised in each of its groups of channels; g is the cotangent of the layer's result.
    """
    images = [materialized(t).unsqueeze(0) for t in (g, x, mean, rstd)]
    sizes = 1, *g.shape, len(rstd)
    scale = torch.empty(len(g), dtype=g.dtype, device=g.device)  # only its presence is asked for
    _, d_scale, d_shift = _aten.native_group_norm_backward(*images, scale, *sizes, (False, True, True))
    return d_scale, d_shift


def end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """(n,): the elements of all tensors of one dtype, copied into one, by one call."""
    flat: Tensor = torch._utils._flatten_dense_tensors(list(tensors))
    return flat.reshape(-1)


def copied_at_once(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of several tensors, by one kernel where a device has one for it."""
    if is_differentiable():
        return [t.clone() for t in tensors]
    copies = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


def distance_gradient(g: Tensor, x: Tensor, y: Tensor, p: float, distances: Tensor) -> Tensor:
    """(B, n, d): the gradient of x (B, n, d), of the p-norm ``distances`` (B, n, m) to the rows of y (B, m, d)."""
    given = [materialized(t) for t in (g, x, y)]
    grad: Tensor = _aten._cdist_backward(*given, p, materialized(distances))
    return grad


Pair = tuple[Tensor, Tensor]  # on the side of the input, and on that of the state


def lstm_cell_gradient(
    d_hy: Tensor | None, d_cy: Tensor | None, gates: Pair, biases: Pair, cx: Tensor, cy: Tensor
) -> Tensor:
    """(B, 4h): the gradient of both gates of a fused LSTM cell, in float32 or wider; the biases' are sums of rows."""
    given = (d_hy, d_cy, *gates, *biases, cx, cy)
    grad: Tensor = _aten._thnn_differentiable_lstm_cell_backward(*map(_widened, given))[0]
    return grad


def gru_cell_gradient(d_hy: Tensor, gates: Pair, biases: Pair, hx: Tensor) -> Pair:
    """(B, 3h) each: those of both gates of a fused GRU cell, in float32 or wider; the biases' are sums of rows."""
    given = (d_hy, *gates, hx, *biases)
    d_input, d_hidden, *_ = _aten._thnn_differentiable_gru_cell_backward(*map(_widened, given))
    return d_input, d_hidden


def _widened(t: Tensor | None) -> Tensor | None:
    """`materialized`, and in float32 at least."""
    return None if t is None else materialized(t.to(torch.promote_types(t.dtype, torch.float32)))
