"""The batch size, as the arguments of a call show it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .trees import leaves


def batch_of(arguments: Any, given: int | None, dim: int) -> int:
    """The number of samples in the arguments, or the number given, if they do not contradict it."""
    sizes = {n: shape for leaf in leaves(arguments) for n, shape in _sizes(leaf, dim)}
    if given is not None:
        if sizes and not any(n % given == 0 for n in sizes):
            raise RuntimeError(
                f"batch_size={given} was given, but no input has that many samples in dim {dim}: their shapes are "
                f"{list(sizes.values())}"
            )
        return given
    if not sizes:
        raise RuntimeError("there is no tensor with a batch among the inputs: pass batch_size=")
    if len(sizes) > 1:
        (first, one), (second, other) = list(sizes.items())[:2]
        raise RuntimeError(
            f"inputs disagree on the batch size in dim {dim}: {first} in shape {one}, {second} in shape {other}. If "
            f"they shall, pass batch_size="
        )
    return next(iter(sizes))


def _sizes(leaf: Any, dim: int) -> list[tuple[int, tuple[int, ...]]]:
    """The size of a leaf's batch, with the shape that shows it; nothing for numbers and options."""
    if isinstance(leaf, PackedSequence):
        return [(int(leaf.batch_sizes[0]), tuple(leaf.data.shape))]
    if not isinstance(leaf, Tensor) or not leaf.ndim:
        return []
    return [(leaf.shape[min(dim, leaf.ndim - 1)], tuple(leaf.shape))]


def holds_batch(tensor: Tensor, batch: int, dim: int) -> bool:
    """Does this input carry the samples in the batch dim?"""
    return tensor.ndim > dim and tensor.shape[dim] == batch
