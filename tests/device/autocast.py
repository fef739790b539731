"""Autocast on the strict device: PyTorch leaves it to each backend, and has none for those that are written in Python.

Products are computed in the lower precision, losses and norms in float32, as on CUDA; all other ops take what they get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_KEY = "AutocastPrivateUse1"
_LOWER = "linear matmul bmm addmm conv2d convolution scaled_dot_product_attention".split()
_FLOAT32 = "cross_entropy_loss layer_norm group_norm softmax.int log_softmax.int nll_loss".split()
_OFF = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def _casting(name: str, lower: bool) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("strict") if lower else torch.float32

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


_anything = torch.library.Library("_", "IMPL")
_anything.fallback(torch.library.fallthrough_kernel, _KEY)
_library = torch.library.Library("aten", "IMPL")
for _name in [*_LOWER, *_FLOAT32]:
    _library.impl(_name, _casting(_name, _name in _LOWER), _KEY)
