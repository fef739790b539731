"""The inputs of a call: how many samples they hold, and what stands for those that want gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..trees import leaves


def batch_of(arguments: Any, given: int | None, dim: int) -> int:
    """The number of samples in the arguments, or the number given, if they do not contradict it."""
    sizes = {n: shape for leaf in leaves(arguments) for n, shape in _sizes(leaf, dim)}
    if given is not None:
        if sizes and given not in sizes:
            raise RuntimeError(
                f"Expected ExpandedWeights to have batch size matching input, but batch_size={given} was given, and no "
                f"input has that many samples in dim {dim}: their shapes are {list(sizes.values())}"
            )
        return given
    if not sizes:
        raise RuntimeError(
            "Unable to find a tensor with a batch in the passed args and kwargs, so that ExpandedWeights cannot "
            "compute the batch size from the inputs: pass batch_size="
        )
    if len(sizes) > 1:
        (first, one), (second, other) = list(sizes.items())[:2]
        raise RuntimeError(
            f"When computing batch size, found at least one input with batch size {first} and one with batch size "
            f"{second}, in dim {dim} of shapes {one} and {other}. If they shall differ, pass batch_size="
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


class StandIns:
    """Other leaves in place of a call's inputs, so that its graph ends there."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # by the input's id

    def __getitem__(self, x: Tensor) -> Tensor:
        """What stands for an input."""
        if id(x) not in self._pairs:
            self._pairs[id(x)] = (x, x.detach().requires_grad_())
        return self._pairs[id(x)][1]

    def of_parameter(self, p: Tensor) -> Tensor:
        """What stands for a parameter that is not expanded, and is no data."""
        return self._pairs.setdefault(id(p), (p, nn.Parameter(p.detach())))[1]

    def let_in(self, plain: Tensor) -> None:
        """A leaf that stands for itself."""
        self._pairs[id(plain)] = (plain, plain)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs that want a gradient and what stands for them; then those that want none."""
        return sorted(self._pairs.values(), key=lambda pair: not pair[0].requires_grad)
