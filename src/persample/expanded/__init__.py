"""Weights that record their own use: the second way in, through ``__torch_function__``.

`ExpandedWeight` stands for a weight with one copy per sample; `implements_per_sample_grads` teaches it a function.

>>> import torch, persample as ps
>>> weight = torch.ones(2, 3, requires_grad=True)
>>> (torch.ones(5, 3) @ ps.expanded.ExpandedWeight(weight, 5, "sum").t()).sum().backward()
>>> weight.grad_sample.shape
torch.Size([5, 2, 3])

The other names are those that rules written for PyTorch's own expanded weights import.

From a function to its factors, by the names of the files: a *weight* hands every function it meets to *dispatch*, which
calls a registered *rule*, or runs the function in a graph kept apart: that of a whole *module*, or one for the function
*alone*. A *gate* in the user's graph waits for the backward, finds the *samples* in the results (*places* and *data*
tell what is known inside) and asks the graph engine, which hears registered rules by *listening*.
"""

from . import places as _shipped_rules  # noqa: F401  (entered on import)
from .porting import (
    forward_helper,
    is_batch_first,
    maybe_scale_by_batch_size,
    set_grad_sample_if_exists,
    standard_kwargs,
    sum_over_all_but_batch_and_last_n,
    unpack_expanded_weight_or_tensor,
)
from .registry import HANDLED as HANDLED_FUNCTIONS
from .rule import Rule, implements_per_sample_grads
from .weight import ExpandedWeight

__all__ = [
    "HANDLED_FUNCTIONS",
    "ExpandedWeight",
    "Rule",
    "forward_helper",
    "implements_per_sample_grads",
    "is_batch_first",
    "maybe_scale_by_batch_size",
    "set_grad_sample_if_exists",
    "standard_kwargs",
    "sum_over_all_but_batch_and_last_n",
    "unpack_expanded_weight_or_tensor",
]
