"""Gradients of convolutions without a forward pass: `torch.nn.grad`, and what it leaves out.

Every function is here for 1, 2 and 3 spatial dims and is written once, below, with N for the number. `conv*_input` and
`conv*_weight` have the signatures of their namesakes in `torch.nn.grad`. Beside them stand the gradients of transposed
convolutions, of biases, and of every sample on its own, `*_per_sample`.

Options are numbers, or one per spatial dim. Inputs are batched. Complex tensors have the gradients that PyTorch gives
them. All but the weights' per-sample gradients can be differentiated again. The gradients of an empty batch are zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeAlias

from torch import Tensor

from ._shapes import Caller, Ints, Padding, Size

# fmt: off
__all__ = [
    "conv1d_bias", "conv1d_bias_per_sample", "conv1d_input", "conv1d_weight", "conv1d_weight_per_sample",
    "conv2d_bias", "conv2d_bias_per_sample", "conv2d_input", "conv2d_weight", "conv2d_weight_per_sample",
    "conv3d_bias", "conv3d_bias_per_sample", "conv3d_input", "conv3d_weight", "conv3d_weight_per_sample",
    "conv_transpose1d_bias", "conv_transpose1d_bias_per_sample", "conv_transpose1d_input",
    "conv_transpose1d_weight", "conv_transpose1d_weight_per_sample",
    "conv_transpose2d_bias", "conv_transpose2d_bias_per_sample", "conv_transpose2d_input",
    "conv_transpose2d_weight", "conv_transpose2d_weight_per_sample",
    "conv_transpose3d_bias", "conv_transpose3d_bias_per_sample", "conv_transpose3d_input",
    "conv_transpose3d_weight", "conv_transpose3d_weight_per_sample",
]
# fmt: on

_P = ParamSpec("_P")
_Three: TypeAlias = tuple[Callable[_P, Tensor], Callable[_P, Tensor], Callable[_P, Tensor]]


def _for_each_dim(function: Callable[Concatenate[Caller, _P], Tensor]) -> _Three[_P]:
    """The function for 1, 2 and 3 spatial dims: Nd in its name and docs is the number, and so is a factor N."""

    function.__qualname__ = function.__name__[1:]  # Python's own errors about arguments show it

    def for_dim(n: int) -> Callable[_P, Tensor]:
        caller = Caller(function.__name__[1:].replace("Nd", f"{n}d"), n)

        def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
            return function(caller, *args, **kwargs)

        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1:]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {k: v for k, v in function.__annotations__.items() if k != "caller"}
        call.__doc__ = (function.__doc__ or "").replace("Nd", f"{n}d").replace("* N", f"* {n}")
        call.__name__ = call.__qualname__ = caller.name
        return call

    return for_dim(1), for_dim(2), for_dim(3)


@_for_each_dim
def _convNd_input(
    caller: Caller,
    input_size: Size,
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """The gradient of `F.convNd` with respect to its input.

    >>> import torch, torch.nn.functional as F
    >>> x, w = torch.randn(2, 4, *[6] * N, requires_grad=True), torch.randn(6, 4, *[3] * N)
    >>> y = F.convNd(x, w, stride=2)
    >>> dy = torch.randn_like(y)
    >>> dx = convNd_input(x.shape, w, dy, stride=2)
    >>> torch.allclose(dx, torch.autograd.grad(y, x, dy)[0], atol=1e-4)
    True

    Args:
        input_size: The input's shape, which the output's alone does not tell if the stride is not 1.
        weight: (C_out, C_in / groups, *kernel).
        grad_output: The gradient at the output, (B, C_out, *out).
        stride: Steps of the kernel over the input.
        padding: Zeros on both sides of the input, or "valid" for none, or "same" for as many as keep its size.
        dilation: Steps between the kernel's elements in the input.
        groups: In how many parts channels are convolved on their own.

    Returns:
        A tensor of shape `input_size`.
    """
    shape = caller.shape("weight", weight, grad_output)
    problem = caller.plain(input_size, shape, grad_output, stride, padding, dilation, groups)
    return problem.input_gradient(weight, grad_output)


@_for_each_dim
def _convNd_weight(
    caller: Caller,
    input: Tensor,
    weight_size: Size,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """The gradient of `F.convNd` with respect to its weight, summed over the batch.

    >>> import torch, torch.nn.functional as F
    >>> x, w = torch.randn(2, 4, *[6] * N), torch.randn(6, 4, *[3] * N, requires_grad=True)
    >>> y = F.convNd(x, w, stride=2)
    >>> dy = torch.randn_like(y)
    >>> dw = convNd_weight(x, w.shape, dy, stride=2)
    >>> torch.allclose(dw, torch.autograd.grad(y, w, dy)[0], atol=1e-4)
    True

    Args:
        input: (B, C_in, *space).
        weight_size: The weight's shape, (C_out, C_in / groups, *kernel).
        grad_output: The gradient at the output, (B, C_out, *out).
        stride: Steps of the kernel over the input.
        padding: Zeros on both sides of the input, or "valid" for none, or "same" for as many as keep its size.
        dilation: Steps between the kernel's elements in the input.
        groups: In how many parts channels are convolved on their own.

    Returns:
        A tensor of shape `weight_size`.
    """
    shape = caller.shape("input", input, grad_output)
    problem = caller.plain(shape, weight_size, grad_output, stride, padding, dilation, groups)
    return problem.weight_gradient(input, grad_output, per_sample=False)


@_for_each_dim
def _convNd_weight_per_sample(
    caller: Caller,
    input: Tensor,
    weight_size: Size,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """Every sample's gradient of `F.convNd` with respect to its weight.

    >>> import torch, torch.nn.functional as F
    >>> x = torch.randn(2, 4, *[6] * N)
    >>> dy = torch.randn_like(F.convNd(x, torch.randn(6, 4, *[3] * N)))
    >>> dw = convNd_weight_per_sample(x, (6, 4, *[3] * N), dy)
    >>> torch.allclose(dw[1], convNd_weight(x[1:], (6, 4, *[3] * N), dy[1:]), atol=1e-4)
    True

    Args:
        input: (B, C_in, *space).
        weight_size: The weight's shape, (C_out, C_in / groups, *kernel).
        grad_output: The gradient at the output, (B, C_out, *out).
        stride: Steps of the kernel over the input.
        padding: Zeros on both sides of the input, or "valid" for none, or "same" for as many as keep its size.
        dilation: Steps between the kernel's elements in the input.
        groups: In how many parts channels are convolved on their own.

    Returns:
        (B, *weight_size), which cannot be differentiated again.
    """
    shape = caller.shape("input", input, grad_output)
    problem = caller.plain(shape, weight_size, grad_output, stride, padding, dilation, groups)
    return problem.weight_gradient(input, grad_output, per_sample=True)


@_for_each_dim
def _convNd_bias(caller: Caller, grad_output: Tensor) -> Tensor:
    """The gradient of `F.convNd` or `F.conv_transposeNd` with respect to its bias, summed over the batch.

    >>> import torch
    >>> convNd_bias(torch.ones(2, 3, *[1] * N))
    tensor([2., 2., 2.])

    Args:
        grad_output: The gradient at the output, (B, C_out, *out).

    Returns:
        (C_out,).
    """
    caller.output_shape(grad_output)
    return grad_output.sum((0, *range(2, caller.dims + 2)))


@_for_each_dim
def _convNd_bias_per_sample(caller: Caller, grad_output: Tensor) -> Tensor:
    """Every sample's gradient of `F.convNd` or `F.conv_transposeNd` with respect to its bias.

    >>> import torch
    >>> convNd_bias_per_sample(torch.ones(2, 3, *[4] * N)).shape
    torch.Size([2, 3])

    Args:
        grad_output: The gradient at the output, (B, C_out, *out).

    Returns:
        (B, C_out).
    """
    caller.output_shape(grad_output)
    return grad_output.sum(tuple(range(2, caller.dims + 2)))


@_for_each_dim
def _conv_transposeNd_input(
    caller: Caller,
    input_size: Size,
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """The gradient of `F.conv_transposeNd` with respect to its input.

    >>> import torch, torch.nn.functional as F
    >>> x, w = torch.randn(2, 4, *[3] * N, requires_grad=True), torch.randn(4, 6, *[3] * N)
    >>> y = F.conv_transposeNd(x, w, stride=2, output_padding=1)
    >>> dy = torch.randn_like(y)
    >>> dx = conv_transposeNd_input(x.shape, w, dy, stride=2, output_padding=1)
    >>> torch.allclose(dx, torch.autograd.grad(y, x, dy)[0], atol=1e-4)
    True

    Args:
        input_size: The input's shape, (B, C_in, *space).
        weight: (C_in, C_out / groups, *kernel).
        grad_output: The gradient at the output, (B, C_out, *out).
        stride: Steps of the kernel over the output.
        padding: How much of the output is cut off on both sides.
        output_padding: How much of it is kept at the far end nevertheless.
        groups: In how many parts channels are convolved on their own.
        dilation: Steps between the kernel's elements in the output.

    Returns:
        A tensor of shape `input_size`.
    """
    shape = caller.shape("weight", weight, grad_output)
    problem = caller.transposed(input_size, shape, grad_output, stride, padding, output_padding, groups, dilation)
    return problem.input_gradient(weight, grad_output)


@_for_each_dim
def _conv_transposeNd_weight(
    caller: Caller,
    input: Tensor,
    weight_size: Size,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """The gradient of `F.conv_transposeNd` with respect to its weight, summed over the batch.

    >>> import torch, torch.nn.functional as F
    >>> x, w = torch.randn(2, 4, *[6] * N), torch.randn(4, 6, *[3] * N, requires_grad=True)
    >>> y = F.conv_transposeNd(x, w, stride=2)
    >>> dy = torch.randn_like(y)
    >>> dw = conv_transposeNd_weight(x, w.shape, dy, stride=2)
    >>> torch.allclose(dw, torch.autograd.grad(y, w, dy)[0], atol=1e-4)
    True

    Args:
        input: (B, C_in, *space).
        weight_size: The weight's shape, (C_in, C_out / groups, *kernel).
        grad_output: The gradient at the output, (B, C_out, *out).
        stride: Steps of the kernel over the output.
        padding: How much of the output is cut off on both sides.
        output_padding: How much of it is kept at the far end nevertheless.
        groups: In how many parts channels are convolved on their own.
        dilation: Steps between the kernel's elements in the output.

    Returns:
        A tensor of shape `weight_size`.
    """
    shape = caller.shape("input", input, grad_output)
    problem = caller.transposed(shape, weight_size, grad_output, stride, padding, output_padding, groups, dilation)
    return problem.weight_gradient(input, grad_output, per_sample=False)


@_for_each_dim
def _conv_transposeNd_weight_per_sample(
    caller: Caller,
    input: Tensor,
    weight_size: Size,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """Every sample's gradient of `F.conv_transposeNd` with respect to its weight.

    >>> import torch, torch.nn.functional as F
    >>> x = torch.randn(2, 4, *[6] * N)
    >>> dy = torch.randn_like(F.conv_transposeNd(x, torch.randn(4, 6, *[3] * N)))
    >>> dw = conv_transposeNd_weight_per_sample(x, (4, 6, *[3] * N), dy)
    >>> torch.allclose(dw[1], conv_transposeNd_weight(x[1:], (4, 6, *[3] * N), dy[1:]), atol=1e-4)
    True

    Args:
        input: (B, C_in, *space).
        weight_size: The weight's shape, (C_in, C_out / groups, *kernel).
        grad_output: The gradient at the output, (B, C_out, *out).
        stride: Steps of the kernel over the output.
        padding: How much of the output is cut off on both sides.
        output_padding: How much of it is kept at the far end nevertheless.
        groups: In how many parts channels are convolved on their own.
        dilation: Steps between the kernel's elements in the output.

    Returns:
        (B, *weight_size), which cannot be differentiated again.
    """
    shape = caller.shape("input", input, grad_output)
    problem = caller.transposed(shape, weight_size, grad_output, stride, padding, output_padding, groups, dilation)
    return problem.weight_gradient(input, grad_output, per_sample=True)


conv1d_input, conv2d_input, conv3d_input = _convNd_input
conv1d_weight, conv2d_weight, conv3d_weight = _convNd_weight
conv1d_weight_per_sample, conv2d_weight_per_sample, conv3d_weight_per_sample = _convNd_weight_per_sample
conv1d_bias, conv2d_bias, conv3d_bias = _convNd_bias
conv1d_bias_per_sample, conv2d_bias_per_sample, conv3d_bias_per_sample = _convNd_bias_per_sample
conv_transpose1d_input, conv_transpose2d_input, conv_transpose3d_input = _conv_transposeNd_input
conv_transpose1d_weight, conv_transpose2d_weight, conv_transpose3d_weight = _conv_transposeNd_weight
conv_transpose1d_weight_per_sample, conv_transpose2d_weight_per_sample, conv_transpose3d_weight_per_sample = (
    _conv_transposeNd_weight_per_sample
)
conv_transpose1d_bias, conv_transpose2d_bias, conv_transpose3d_bias = _convNd_bias
conv_transpose1d_bias_per_sample, conv_transpose2d_bias_per_sample, conv_transpose3d_bias_per_sample = (
    _convNd_bias_per_sample
)
