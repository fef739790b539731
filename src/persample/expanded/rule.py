"""Teaching expanded weights a new function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..factors import Dense, Factor, combine
from ..graph.custom import teach
from ..graph.flows.registry import Layouts
from ..graph.invoke import call
from ..graph.layout import sample_dims
from ..graph.rules.registry import Use
from ..graph.site import Fate, Flow, Site
from ..graph.tape import is_leaf
from .contributions import contributions
from .porting import check_data, check_shape, hand_over, maybe_scale_by_batch_size, standard_kwargs
from .registry import enter
from .samples import along
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
        """Per argument: a tensor for data, a `Factor` for a weight, or None."""
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
            teach(function, _stays)(_listen)
        return cls

    return decorate


_ENGINE_KNOWS: set[type] = set()


def _as_function(rule: type[Rule]) -> type[torch.autograd.Function]:
    """The same rule in the form of an ``autograd.Function``."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, kwarg_names: Sequence[str], func: Callable[..., Any], *values: Any) -> Any:
            check_data(func, values[0] if values else None, values)
            ctx.count = len(values)
            ctx.weights = {i: value for i, value in enumerate(values) if isinstance(value, ExpandedWeight)}
            plain = [value.orig_weight if i in ctx.weights else value for i, value in enumerate(values)]
            args, kwargs = standard_kwargs(kwarg_names, plain)
            return rule.forward(ctx, *args, **kwargs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            found = list(rule.backward(ctx, *grads))
            if len(found) != ctx.count:
                raise RuntimeError(f"{rule.__name__}.backward returned {len(found)} values for {ctx.count} arguments")
            for i, value in enumerate(found):
                if i in ctx.weights or isinstance(value, Factor):
                    found[i] = None
                    _take(rule, value, ctx.weights.get(i), ctx.needs_input_grad[i + 2])
            return None, None, *found

    Function.__name__ = Function.__qualname__ = rule.__name__
    return Function


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
        scale = maybe_scale_by_batch_size(torch.ones(()), weight) if weight.samples is None else 1
        hand_over(weight, value if scale == 1 else Dense(value.stack() * scale))
    elif value is not None:
        raise RuntimeError(f"{rule.__name__}.backward returned a {type(value).__name__} for a weight, not a Factor")


def _stays(site: Site, k: int, layouts: Layouts) -> Fate:
    """Data keep their samples in the dim in which the result has them; weights are shared."""
    if site.is_weight(k):
        return Flow.SHARED
    layout, shape, target = layouts[0], site.shapes[0], site.target(k)
    dims = sample_dims(layout, shape) if layout is not None else ()
    if layout is None or len(dims) != 1 or len(target) <= dims[0] or target[dims[0]] != layout.batch:
        return Flow.PROBE
    return along(target, dims[0], layout.batch)


def _listen(use: Use) -> Factor | None:
    """Run the rule's backward once, and take what it contributes to the weights."""
    site, layout = use.site, use.layouts[0]
    dims = () if layout is None else sample_dims(layout, site.shapes[0])
    places = {}
    for k, slot in site.outputs:
        below = slot[0].next_functions
        leaf = below[0][0] if len(below) == 1 else None  # an expanded weight is a view of its leaf
        if leaf is not None and is_leaf(leaf):
            places[k] = leaf
    if use.k not in places:
        return None
    if dims != (site.node.batch_dim,):  # type: ignore[attr-defined]
        raise RuntimeError(
            f"the rule {site.name} reads another dim as the batch than {dims}, in which the samples lie in its result "
            f"of shape {site.shapes[0]}"
        )
    if "given" not in site.memo:
        with contributions(list(places.values())) as given:
            call(site.node, use.cotangents, site.edges)
        site.memo["given"] = given
    terms = site.memo["given"][places[use.k]]
    return combine(terms) if terms else Dense(use.g.new_zeros(use.batch, *use.target))
