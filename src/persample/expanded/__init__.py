"""Weights that record their own use: the second way in, through ``__torch_function__``.

`ExpandedWeight` stands for a weight with one copy per sample; `implements_per_sample_grads` teaches it a function.

>>> import torch, persample as ps
>>> weight = torch.ones(2, 3, requires_grad=True)
>>> (torch.ones(5, 3) @ ps.expanded.ExpandedWeight(weight, 5, "sum").t()).sum().backward()
>>> weight.grad_sample.shape
torch.Size([5, 2, 3])

The other names are those that rules written for PyTorch's own expanded weights import.

The road from a function to its factors, by the names of the files:

1. A `weight` sees every function that it is given to. One with a registered rule (`rules`, and `porting` for those
   written for PyTorch) is replaced by that. Any other runs as it is, with plain leaves in place of weights and
   inputs (`inputs`), so that its graph is kept apart from the user's.
2. So a whole `module` is recorded, or one function `alone`. The results hang on one node of the user's graph, the
   `gate`. When a backward comes to it, it asks the graph engine for every weight's factor and hands these on; `engine`
   lists all that is asked besides.
3. The engine has to be told where the samples lie in the results. `samples` makes guesses by size, the dim that the
   contract names first, and takes the first one that agrees with the *evidence*: what is known of the results of
   functions that were given the call's data.
4. Where PyTorch's layers leave the samples is known (`functions`). For all else, `data` notes the functions of the
   call's inputs, which no graph shows, and `replay` runs them again with some samples changed. This tells where samples
   lie in their results, and refuses those in which samples have met. `origins` knows the constants that no data went
   into.
"""

from .functions import HANDLED as HANDLED_FUNCTIONS
from .porting import (
    forward_helper,
    is_batch_first,
    maybe_scale_by_batch_size,
    set_grad_sample_if_exists,
    standard_kwargs,
    sum_over_all_but_batch_and_last_n,
    unpack_expanded_weight_or_tensor,
)
from .rules import Rule, implements_per_sample_grads
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
