"""Teaching expanded weights a new function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..factors import Factor
from ..graph.custom import teach
from .listening import listen, stays
from .porting import check_data, check_shape, hand_over, standard_kwargs
from .registry import enter
from .weight import ExpandedWeight

C = TypeVar("C", bound=type)


class Rule:
    """A function's forward and its backward, of which the weights' parts are factors.

    Subclass, write both, and register with `implements_per_sample_grads`. Data come first, with the batch in dim 0
    (or dim 1, see ``ExpandedWeight.set_batch_first``).
    """

    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """The result, for plain tensors; ``ctx`` is as in ``torch.autograd.Function``."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Sequence[Tensor | Factor | None]:
        """Per parameter of `forward`: a tensor for data, a `Factor` for a weight, or None (may be left out last)."""
        raise NotImplementedError


def implements_per_sample_grads(torch_function: Callable[..., Any]) -> Callable[[C], C]:
    """Enter a class as the rule of a function that may be given expanded weights.

    >>> import torch, persample as ps
    >>> from persample.factors import Dense
    >>> def scale(x, weight):
    ...     if torch.overrides.has_torch_function((x, weight)):
    ...         return torch.overrides.handle_torch_function(scale, (x, weight), x, weight)
    ...     return x * weight
    >>> @ps.expanded.implements_per_sample_grads(scale)
    ... class Scale(ps.expanded.Rule):
    ...     @staticmethod
    ...     def forward(ctx, x, weight):
    ...         ctx.save_for_backward(x, weight)
    ...         return x * weight
    ...
    ...     @staticmethod
    ...     def backward(ctx, g):
    ...         x, weight = ctx.saved_tensors
    ...         return g * weight, Dense(g * x)
    >>> weight = torch.ones(3, requires_grad=True)
    >>> scale(torch.ones(5, 3), ps.expanded.ExpandedWeight(weight, 5, "sum")).sum().backward()
    >>> weight.grad_sample.shape
    torch.Size([5, 3])

    Args:
        torch_function: a function of PyTorch, or one of your own that offers itself to ``__torch_function__``.

    Returns:
        A decorator for a `Rule`, or for an ``autograd.Function`` that is called as
        ``apply(kwarg_names, func, *args, *kwarg_values)`` and uses `set_grad_sample_if_exists`; it returns the class.
    """

    def decorate(cls: C) -> C:
        if not isinstance(cls, type) or not issubclass(cls, (Rule, torch.autograd.Function)):
            raise RuntimeError(f"a rule is a subclass of Rule or of torch.autograd.Function, not {cls!r}")
        function = _as_function(cls) if issubclass(cls, Rule) else cls
        enter(torch_function, function)
        if function not in _ENGINE_KNOWS:  # one class may serve several functions
            _ENGINE_KNOWS.add(function)
            teach(function, stays)(listen)
        return cls

    return decorate


_ENGINE_KNOWS: set[type] = set()


def _as_function(rule: type[Rule]) -> type[torch.autograd.Function]:
    """The same rule in the form of an ``autograd.Function``."""
    names = list(inspect.signature(rule.forward).parameters)[1:]

    def forward(ctx: Any, kwarg_names: Sequence[str], func: Callable[..., Any], *values: Any) -> Any:
        check_data(func, values[0] if values else None, values)
        weights = {i: value for i, value in enumerate(values) if isinstance(value, ExpandedWeight)}
        plain = [value.orig_weight if i in weights else value for i, value in enumerate(values)]
        args, kwargs = standard_kwargs(kwarg_names, plain)
        places = [*range(len(args)), *[names.index(name) if name in names else -1 for name in kwarg_names]]
        ctx._persample_arguments = weights, places
        return rule.forward(ctx, *args, **kwargs)

    def backward(ctx: Any, *grads: Any) -> Any:
        weights, places = ctx._persample_arguments
        returned = list(rule.backward(ctx, *grads))
        if len(returned) > max(len(names), len(places)) or any(places[i] >= len(returned) for i in weights):
            raise RuntimeError(f"{rule.__name__}.backward returned {len(returned)} values for arguments {names}")
        returned += [None] * (max(places, default=0) + 1 - len(returned))
        found = [None if place < 0 else returned[place] for place in places]
        for i, value in enumerate(found):
            if i in weights or isinstance(value, Factor):
                found[i] = None
                _take(rule, value, weights.get(i), ctx.needs_input_grad[i + 2])
        return None, None, *found

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(rule.__name__, (torch.autograd.Function,), methods)


def _take(rule: type[Rule], value: Any, weight: ExpandedWeight | None, wanted: bool) -> None:
    """What a rule returned for one argument, where that is a weight or a factor."""
    if weight is None:
        if wanted:
            raise RuntimeError(
                f"{rule.__name__}.backward returned a factor for an argument that wants a gradient, but is no expanded "
                f"weight: data, a weight computed from others, or a plain parameter"
            )
    elif isinstance(value, Factor):
        check_shape(rule.__name__, weight, (value.batch, *value.shape))
        hand_over(weight, value)
    elif value is not None:
        raise RuntimeError(f"{rule.__name__}.backward returned a {type(value).__name__} for a weight, not a Factor")
