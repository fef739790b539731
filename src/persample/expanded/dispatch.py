"""What happens when a function meets an expanded weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..kernels.library import lays_out_fused_weights
from ..trees import leaves
from .alone import CANNOT_HANDLE, call_alone
from .registry import HANDLED, Shipped, name_of

if TYPE_CHECKING:
    from .weight import ExpandedWeight


def dispatch(
    cls: type[ExpandedWeight], func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """A registered rule, or the function itself: on the module's record, or on one of its own."""
    if lays_out_fused_weights(func):
        return None  # fused weights are laid out anew; these are never fused
    weights = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, cls)]
    rule = HANDLED.get(func)
    if rule is not None and not isinstance(rule, Shipped):
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
    samples = weights[0].samples
    if samples is None:
        return call_alone(cls, func, args, kwargs, rule, weights)
    args, kwargs = cls.unwrap((args, kwargs))
    result = func(*args, **kwargs)
    if rule is not None and rule.inside is not None:
        rule.inside((args, kwargs), result, samples)
    return result
