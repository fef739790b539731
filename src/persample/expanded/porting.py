"""The helpers that rules written for PyTorch's own expanded weights use, under the same names.

Such a rule is an ``autograd.Function`` called as ``apply(kwarg_names, func, *args, *kwarg_values)``. Its backward hands
a weight's per-sample gradients to `set_grad_sample_if_exists` and returns gradients of the data only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..factors import Dense, Factor
from ..graph.read.roots import slot_of
from .alone import add_grad_sample, write
from .functions import name_of
from .gate import contribute
from .weight import ExpandedWeight


def standard_kwargs(kwarg_names: Sequence[str], expanded_args: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, from one list in which the latter come last."""
    split = len(expanded_args) - len(kwarg_names)
    return tuple(expanded_args[:split]), dict(zip(kwarg_names, expanded_args[split:], strict=True))


def is_batch_first(expanded_args_and_kwargs: Sequence[Any]) -> bool | None:
    """Whether the batch is dim 0, as all expanded weights among the arguments say; None if there is none."""
    said = {arg.batch_first for arg in expanded_args_and_kwargs if isinstance(arg, ExpandedWeight)}
    if len(said) > 1:
        raise RuntimeError("Got conflicting batch_first arguments in the same layer, from its expanded weights")
    return said.pop() if said else None


def forward_helper(func: Callable[..., Any], expanded_args: Sequence[Any], expanded_kwargs: Mapping[str, Any]) -> Any:
    """The function's result for the original weights, with the batch sizes checked; data come first."""
    values = [*expanded_args, *expanded_kwargs.values()]
    check_data(func, expanded_args[0] if expanded_args else None, values)
    args = [_original(arg) for arg in expanded_args]
    return func(*args, **{name: _original(arg) for name, arg in expanded_kwargs.items()})


def check_data(func: Callable[..., Any], data: Any, values: Sequence[Any]) -> None:
    """Refuse data that do not carry the batch of the expanded weights among ``values``."""
    weights = [value for value in values if isinstance(value, ExpandedWeight)]
    dim = 0 if is_batch_first(values) in (True, None) else 1
    if isinstance(data, ExpandedWeight):
        raise RuntimeError(
            f"Expanded Weights do not support inputs that are also ExpandedWeights. The first argument of "
            f"{name_of(func)} must be a plain tensor of data"
        )
    if not isinstance(data, Tensor):
        raise RuntimeError(
            f"Expanded Weights requires a Tensor as the first input to get the batch dimension, got "
            f"{type(data).__name__} in function {name_of(func)}"
        )
    if not data.ndim:
        raise RuntimeError(
            f"Expanded Weights requires a batch dimension but got an input of size 0 in function {name_of(func)}: data "
            f"of shape ()"
        )
    if data.ndim <= dim:
        raise RuntimeError(
            f"Expanded Weights requires a batch dimension but {name_of(func)} was given data of shape "
            f"{tuple(data.shape)}, which have no batch dim {dim}"
        )
    if len({weight.loss_reduction for weight in weights}) > 1:
        raise RuntimeError(
            f"Expected ExpandedWeights to all have the same loss_reduction argument, but those given to "
            f"{name_of(func)} disagree on it"
        )
    _check_count(func, data.shape[dim], weights)


def _check_count(func: Callable[..., Any], count: int, weights: Sequence[ExpandedWeight]) -> None:
    """Refuse another number of samples than the weights have; none is a number that they may have."""
    sizes = [
        w.batch_size for w in weights if count > w.batch_size or (count < w.batch_size and not w.allow_smaller_batches)
    ]
    if not count and (sizes or not weights):
        raise RuntimeError(
            f"0 is not a valid batch size for Expanded Weights, unless it is their own: {name_of(func)} was given no "
            f"sample, and expanded weights of batch sizes {sizes}"
        )
    if sizes:
        raise RuntimeError(
            f"Expected ExpandedWeights to have batch size matching input, but {name_of(func)} was given {count} "
            f"samples, and an ExpandedWeight of batch size {sizes[0]}"
        )


def _original(value: Any) -> Any:
    return value.orig_weight if isinstance(value, ExpandedWeight) else value


def unpack_expanded_weight_or_tensor(maybe_expanded_weight: Any, func: Callable[[Tensor], Any] = lambda x: x) -> Any:
    """``func`` of the original weight, or of a tensor that is no weight; None for anything else."""
    if isinstance(maybe_expanded_weight, ExpandedWeight):
        return func(maybe_expanded_weight.orig_weight)
    if isinstance(maybe_expanded_weight, Tensor):
        if maybe_expanded_weight.requires_grad:
            raise RuntimeError(
                f"ExpandedWeights currently does not support a mixture of ExpandedWeight parameters and normal "
                f"Parameters in a ported rule, given a plain tensor of shape {tuple(maybe_expanded_weight.shape)} that "
                f"requires grad, whose gradient would be lost"
            )
        return func(maybe_expanded_weight)
    return None


def maybe_scale_by_batch_size(grad_sample: Tensor, expanded_weight: ExpandedWeight) -> Tensor:
    """Undo the division of a mean loss."""
    return grad_sample if expanded_weight.scale == 1 else grad_sample * expanded_weight.scale


def set_grad_sample_if_exists(maybe_expanded_weight: Any, per_sample_grad_fn: Callable[[Tensor], Tensor]) -> None:
    """Hand over the per-sample gradients of one use of a weight; nothing happens for what is no expanded weight.

    A weight by itself takes values of any shape, as PyTorch's does (norms, say); in a module, they are combined with
    those of other uses, and must be of the weight's shape.
    """
    unpacked = unpack_expanded_weight_or_tensor(maybe_expanded_weight)
    if isinstance(maybe_expanded_weight, ExpandedWeight):
        weight, value = maybe_expanded_weight, per_sample_grad_fn(unpacked)
        if weight.samples is None and tuple(value.shape[1:]) != tuple(weight.orig_weight.shape):
            _add_values(weight, value)
        else:
            check_shape("a rule", weight, tuple(value.shape))
            hand_over(weight, Dense(value))


def _add_values(weight: ExpandedWeight, value: Tensor) -> None:
    """Values of another shape than the weight's, one per sample."""
    if value.ndim == 0 or len(value) > weight.batch_size:
        raise RuntimeError(
            f"a rule gave per-sample values of shape {tuple(value.shape)} for an ExpandedWeight of batch size "
            f"{weight.batch_size}: expected that many rows"
        )
    add_grad_sample(weight, value)


def check_shape(what: str, weight: ExpandedWeight, shape: tuple[int, ...]) -> None:
    """Refuse what cannot be the gradients of the samples of a weight."""
    expected = (weight.batch_size, *weight.orig_weight.shape)
    fewer = weight.allow_smaller_batches and bool(shape) and shape[0] < expected[0]
    if len(shape) != len(expected) or shape[1:] != expected[1:] or not (fewer or shape[0] == expected[0]):
        raise RuntimeError(f"{what} gave per-sample gradients of shape {shape} for a weight; expected {expected}")


def hand_over(weight: ExpandedWeight, factor: Factor) -> None:
    """One use of a weight: straight to its ``grad_sample``, or to the record of the module that it is part of."""
    if weight.samples is None:
        write(factor, weight)
    else:
        contribute(slot_of(weight.leaf)[0], factor)


def sum_over_all_but_batch_and_last_n(tensor: Tensor, n_dims: int) -> Tensor:
    """(B, ..., *last n) -> (B, *last n)."""
    between = tuple(range(1, tensor.ndim - n_dims))
    return tensor.sum(between) if between else tensor
