"""The gradient of cross entropy at its logits, where these come from a linear layer and were not kept."""

from __future__ import annotations

from torch import Tensor

from .differentiable import is_differentiable
from .norms import wide

__all__ = ["logit_gradients"]


def logit_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignored: int,
    g: Tensor,
) -> Tensor:
    """(N, V): g[n] · w[y] · (softmax(x[n] weightᵀ + bias) - e_y) for y = target[n], and 0 where y is ``ignored``.

    Computed in float32 or wider from x (N, d), weight (V, d) and bias (V,), for cotangents g (N,) of the losses.

    >>> import torch
    >>> x, weight = torch.tensor([[1.0], [1.0]]), torch.zeros(2, 1)
    >>> logit_gradients(x, weight, None, torch.tensor([1, 0]), None, -100, torch.tensor([2.0, 4.0]))
    tensor([[ 1., -1.],
            [-2.,  2.]])
    """
    dtype = wide(x.dtype)
    logits = x.to(dtype) @ weight.to(dtype).t()
    if bias is not None:
        logits += bias.to(dtype)
    softmax = logits.softmax(1) if is_differentiable() else _softmax_in_place(logits)
    skipped = target == ignored
    y = target.masked_fill(skipped, 0)
    correct = y.unsqueeze(1), softmax.new_full((len(y), 1), -1.0)
    gradients = softmax.scatter_add(1, *correct) if is_differentiable() else softmax.scatter_add_(1, *correct)
    scale = g.to(dtype) if class_weight is None else g.to(dtype) * class_weight.to(dtype)[y]
    return gradients.mul_(scale.masked_fill(skipped, 0).unsqueeze(1))


def _softmax_in_place(logits: Tensor) -> Tensor:
    """Softmax in the memory of the logits, which are large."""
    if len(logits):
        logits.sub_(logits.amax(1, keepdim=True)).exp_()
    return logits.div_(logits.sum(1, keepdim=True))
