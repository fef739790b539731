"""What ``params`` may be, and giving results back in the same container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from ._errors import UnsupportedError
from .graph.read.saved import has_hooks
from .modules import parameters_of

Params = nn.Module | Mapping[str, Tensor] | Sequence[Tensor]
T = TypeVar("T")


def named(params: Params) -> dict[str, Tensor]:
    """The trainable leaf tensors of ``params`` by name; positions serve as names in a sequence."""
    if isinstance(params, nn.Module):
        tensors = {name: p for name, p in parameters_of(params).items() if p.requires_grad}
    elif isinstance(params, Mapping):
        tensors = {name: p for name, p in params.items() if _checked(p, repr(name)).requires_grad}
    elif isinstance(params, Sequence):
        tensors = {str(i): _trainable(p, f"params[{i}]") for i, p in enumerate(params)}
    else:
        raise TypeError(
            f"params must be an nn.Module, a mapping from names to tensors or a sequence of tensors, "
            f"not {type(params).__name__}; for one tensor write [tensor], for a generator list(...)"
        )
    for name, p in tensors.items():
        _refuse_sparse(p, name)
    refuse_hooks(tensors)
    return tensors


def _checked(p: object, what: str) -> Tensor:
    if not isinstance(p, Tensor):
        raise TypeError(f"params must hold tensors, but {what} is a {type(p).__name__}")
    if p.requires_grad and not p.is_leaf:
        raise ValueError(
            f"params must hold leaf tensors, but {what} of shape {tuple(p.shape)} was computed by "
            f"{type(p.grad_fn).__name__}: pass the tensors it was computed from"
        )
    return p


def _trainable(p: object, what: str) -> Tensor:
    tensor = _checked(p, what)
    if not tensor.requires_grad:
        raise ValueError(
            f"{what} of shape {tuple(tensor.shape)} does not require grad: leave it out, or call requires_grad_() "
            f"before the losses are computed"
        )
    return tensor


def _refuse_sparse(p: Tensor, name: str) -> None:
    """Its gradient is defined at the places that hold numbers, and PyTorch's ops do not agree on which form it has."""
    if p.layout != torch.strided:
        raise UnsupportedError(
            f"parameter {name!r} of shape {tuple(p.shape)} is sparse ({p.layout}): train p.to_dense(), or the values "
            f"alone (torch.sparse_coo_tensor(indices, values, size) inside the model)"
        )


def refuse_hooks(tensors: Mapping[str, Tensor]) -> None:
    """A tensor hook would change the gradient of the sum, which is never computed here."""
    for name in [name for name, p in tensors.items() if has_hooks(p)]:
        raise ValueError(
            f"parameter {name!r} has hooks (register_hook), which see only gradients summed over the batch and would "
            f"be passed over: remove them, or apply the same function to the per-sample gradients"
        )


def pack(params: Params, results: Mapping[str, T]) -> dict[str, T] | tuple[T, ...]:
    """Results by name in the container that ``params`` came in: a tuple for a sequence, else a dict."""
    if isinstance(params, (nn.Module, Mapping)):
        return dict(results)
    return tuple(results.values())
