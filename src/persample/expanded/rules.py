"""Teaching expanded weights a new function: the rules that users register, and what the graph engine does with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..factors import Dense, Factor, combine
from ..graph.layout import Layout, Shape, sample_dims
from ..graph.ops.custom import teach
from ..graph.ops.table import Layouts
from ..graph.ops.use import Use
from ..graph.read.invoke import call
from ..graph.read.nodes import is_leaf
from ..graph.read.site import Flow, Outcome, Site
from .functions import enter
from .gate import contributions
from .porting import check_data, check_shape, hand_over, standard_kwargs
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
            teach(function, _flow)(_factor)
        return cls

    return decorate


_ENGINE_KNOWS: set[type] = set()


def _as_function(rule: type[Rule]) -> type[torch.autograd.Function]:
    """A rule in the form of an ``autograd.Function``."""
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
        gradients = [None if place < 0 else returned[place] for place in places]
        for i, value in enumerate(gradients):
            if i in weights or isinstance(value, Factor):
                gradients[i] = None
                _take(rule, value, weights.get(i), ctx.needs_input_grad[i + 2])
        return None, None, *gradients

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


def _flow(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Where a rule's node sends samples: data have them in the same dim as the results, weights are shared."""
    if site.is_weight(k):
        return Flow.SHARED
    batch, dim, target = _batch_dim(layouts, site.shapes), site.node._persample_dim, site.target(k)  # type: ignore[attr-defined]
    if batch is None or len(target) <= dim or target[dim] != batch[0] or batch[1] != (dim,):
        return Flow.PROBE
    return along(target, dim, batch[0])


def _batch_dim(layouts: Sequence[Layout | None], shapes: Sequence[Shape]) -> tuple[int, Shape] | None:
    """How many samples there are, and the dims they have in the first result that is used."""
    for layout, shape in zip(layouts, shapes, strict=True):
        if layout is not None:
            return layout.batch, sample_dims(layout, shape)
    return None


def _factor(use: Use) -> Factor | None:
    """What a rule contributes to a weight in a recorded module; its backward is run once for all of its weights."""
    site = use.site
    below = site.node.next_functions
    places = {k: leaf for k, _ in site.outputs if (leaf := _weight_leaf(below[k][0])) is not None}
    if use.k not in places:
        return None
    batch, dim = _batch_dim(use.layouts, site.shapes), site.node._persample_dim  # type: ignore[attr-defined]
    if batch is None or batch[1] != (dim,):
        raise RuntimeError(
            f"the rule {site.name} reads dim {dim} of its results as the batch, but of shapes {list(site.shapes)} the "
            f"samples lie in dims {batch and batch[1]}"
        )
    if "given" not in site.memo:
        with contributions(list(places.values())) as given:
            returned = call(site.node, use.cotangents, site.edges)
        if any(returned[k] is not None for k in places):
            raise RuntimeError(f"the rule {site.name} returned an ordinary gradient for a weight, which would be lost")
        site.memo["given"] = given
    terms = site.memo["given"].pop(places[use.k], [])  # a weight may be several arguments, and has one factor
    like = next(g for g in use.cotangents if g is not None)
    return combine(terms) if terms else Dense(like.new_zeros(use.batch, *use.target))


def _weight_leaf(node: Node | None) -> Node | None:
    """The leaf of an expanded weight, which is a view of it."""
    below = () if node is None else node.next_functions
    leaf = below[0][0] if len(below) == 1 else None
    return leaf if leaf is not None and is_leaf(leaf) and type(node).__name__ == "AliasBackward0" else None
