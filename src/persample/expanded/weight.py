"""A weight that stands for one copy of itself per sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.library import lays_out_fused_weights
from ..trees import leaves, tree_map
from .alone import CANNOT_HANDLE, call_alone
from .functions import HANDLED, Known, name_of
from .gate import Flag
from .samples import Samples


class ExpandedWeight(Tensor):
    """Acts as ``orig_weight`` in every function, and records its use.

    A backward through what was computed from it writes ``orig_weight.grad_sample``, of shape
    ``(batch_size, *orig_weight.shape)``, and leaves ``orig_weight.grad`` alone.

    >>> import torch, persample as ps
    >>> weight = torch.ones(2, 3, requires_grad=True)
    >>> expanded = ps.expanded.ExpandedWeight(weight, 5, "sum")
    >>> torch.nn.functional.linear(torch.ones(5, 3), expanded).sum().backward()
    >>> weight.grad_sample.shape, weight.grad
    (torch.Size([5, 2, 3]), None)

    Args:
        orig_weight: the weight; it must require grad.
        batch_size: how many samples there are.
        loss_reduction: ``"sum"``, or ``"mean"`` when the loss is divided by the batch size and gradients shall not be.
    """

    orig_weight: Tensor
    batch_size: int
    loss_reduction: str
    batch_first: bool
    allow_smaller_batches: bool
    leaf: Tensor  # stands for the weight in graphs; a function of other leaves for what was computed from weights
    sources: tuple[ExpandedWeight, ...]  # the weights it was computed from, if it was
    working: Flag  # up while a gradient may come to the leaf
    samples: Samples | None  # set while a whole module is recorded

    handled_functions = HANDLED

    def __new__(cls, orig_weight: Tensor, batch_size: int, loss_reduction: str) -> ExpandedWeight:
        if not isinstance(orig_weight, Tensor):
            raise RuntimeError(f"Can only make Expanded Weights of Tensors, got {type(orig_weight).__name__}")
        if isinstance(orig_weight, ExpandedWeight):
            raise RuntimeError("Can only make Expanded Weights of weights, got another ExpandedWeight")
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 0:
            raise RuntimeError(f"batch_size must be a whole number of samples, not {batch_size!r}")
        if not orig_weight.requires_grad:
            raise RuntimeError(  # in the words of all releases of PyTorch, which have changed
                f"Can only build ExpandedWeights objects of tensors that require_grad, got one of shape "
                f"{tuple(orig_weight.shape)} that does not: call requires_grad_() on it. (Can only build "
                f"ExpandedWeights objects of tensors that requires_grad)"
            )
        if loss_reduction not in ("sum", "mean"):
            raise RuntimeError(f"Expected loss_reduction argument to be sum or mean, got {loss_reduction!r}")
        made = cls._make(orig_weight.detach().requires_grad_())
        made.sources, made.working = (), Flag()
        made.leaf.register_hook(partial(_refuse, made.working, tuple(orig_weight.shape)))
        return made

    def __init__(self, orig_weight: Tensor, batch_size: int, loss_reduction: str) -> None:
        self.orig_weight, self.batch_size, self.loss_reduction = orig_weight, batch_size, loss_reduction
        self.batch_first, self.allow_smaller_batches = True, False
        self.samples = None

    @classmethod
    def _make(cls, leaf: Tensor) -> ExpandedWeight:
        with torch.enable_grad():
            made: ExpandedWeight = leaf.as_subclass(cls)  # a node of its own, so that registered rules can be told
        made.leaf = leaf
        return made

    @classmethod
    def computed(cls, leaf: Tensor, weights: Sequence[ExpandedWeight]) -> ExpandedWeight:
        """What was computed from weights alone is a weight, too."""
        made, like = cls._make(leaf), weights[0]
        made.__init__(leaf, like.batch_size, like.loss_reduction)  # type: ignore[misc]
        made.batch_first, made.allow_smaller_batches = like.batch_first, like.allow_smaller_batches
        made.working = Flag()
        made.sources = tuple({id(base): base for weight in weights for base in weight.bases}.values())
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a registered rule, or the function itself: on the record of a module, or on one of its own."""
        given, named = tuple(args), kwargs or {}
        if lays_out_fused_weights(func):
            return None  # fused weights are laid out anew; these are never fused
        weights = [leaf for leaf in leaves((given, named)) if isinstance(leaf, cls)]
        rule, samples = HANDLED.get(func), weights[0].samples
        if rule is not None and not isinstance(rule, Known):
            return _call_rule(rule, func, given, named, weights)
        if samples is None:
            return call_alone(cls, func, given, named, rule, weights)
        given, named = cls.unwrap((given, named))
        result = func(*given, **named)
        if rule is not None and rule.inside is not None:
            rule.inside((given, named), result, samples)
        return result

    @property
    def scale(self) -> int:
        """What the user's loss was divided by."""
        return self.batch_size if self.loss_reduction == "mean" else 1

    @classmethod
    def unwrap(cls, tree: Any) -> Any:
        """Arguments with the leaf in place of every weight."""
        return tree_map(lambda leaf: leaf.leaf if isinstance(leaf, cls) else leaf, tree)

    @property
    def bases(self) -> tuple[ExpandedWeight, ...]:
        """The weights that gradients go to: itself, or those it was computed from."""
        return self.sources or (self,)

    @property
    def data(self) -> Tensor:
        """The original's data."""
        return self.orig_weight.data

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.data_ptr() != self.orig_weight.data_ptr() or value.dtype != self.orig_weight.dtype:
            raise RuntimeError("a weight was given other data (.data = …, module.to(…)) while its use is recorded")

    def set_batch_first(self, is_batch_first: bool = True) -> None:
        """Say whether the batch is dim 0 of the data that this weight meets, or dim 1."""
        self.batch_first = is_batch_first

    def set_allow_smaller_batches(self, is_allow_smaller_batches: bool) -> None:
        """Let data hold fewer samples than ``batch_size``: they are the first ones."""
        self.allow_smaller_batches = is_allow_smaller_batches

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ExpandedWeight(batch_size={self.batch_size}, orig_weight={self.orig_weight!r})"


def _call_rule(
    rule: type[torch.autograd.Function],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    weights: Sequence[ExpandedWeight],
) -> Any:
    """The result of a registered rule, whose nodes know in which dim the batch is."""
    for weight in weights:
        if weight.sources:
            raise RuntimeError(
                f"{CANNOT_HANDLE} {name_of(func)} of a weight of shape {tuple(weight.leaf.shape)} that was "
                f"computed from others: the rule registered for it takes weights themselves"
            )
    result = rule.apply(tuple(kwargs), func, *args, *kwargs.values())
    for leaf in leaves(result):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn._persample_dim = 0 if weights[0].batch_first else 1  # type: ignore[attr-defined]
    return result


def _refuse(working: Flag, shape: tuple[int, ...], g: Tensor | None) -> None:
    """A gradient that comes to a leaf in any other way would be lost."""
    if g is not None and not working.up:
        raise RuntimeError(
            f"a gradient came to an expanded weight of shape {shape} from a tensor that is not a result of the "
            f"recorded call, or without passing any sample: which sample it belongs to cannot be known. Return "
            f"such tensors (an auxiliary loss kept on the module) from forward; add penalties on weights outside"
        )
