"""Teaching the engine a custom ``autograd.Function``.

A custom backward may be anything, so the engine asks it by running it: exact, but one call per sample. A rule
registered here says what the backward would, as a factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from .flows.registry import Rule as FlowRule
from .rules.registry import Rule
from .saved import function_of, is_custom


@dataclass(frozen=True, slots=True)
class Taught:
    """What is known of one Function: its factors, and where it sends samples (None: found out by running it)."""

    rule: Rule
    flow: FlowRule | None = None


_TAUGHT: dict[type, Taught] = {}


def teach(function: type[torch.autograd.Function], flow: FlowRule | None = None) -> Callable[[Rule], Rule]:
    """Enter a rule for a custom Function.

    The rule is called as ``rule(use)`` for every input of the Function that leads to a parameter and is shared by the
    samples: ``use.k`` is that input's place among the tensor arguments, ``use.g`` the cotangent of the first output and
    ``use.site.node`` the Function's ``ctx``. It returns a `Factor`, or None where it does not know one.

    >>> import torch
    >>> from persample.factors import Dense
    >>> class Scale(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x, weight):
    ...         ctx.save_for_backward(x, weight)
    ...         return x * weight
    ...
    ...     @staticmethod
    ...     def backward(ctx, g):
    ...         x, weight = ctx.saved_tensors
    ...         return g * weight, (g * x).sum(0)
    >>> @teach(Scale)
    ... def scale(use):
    ...     x, _ = use.site.node.saved_tensors
    ...     return Dense(use.lanes(1).sum(use.g * x)) if use.k == 1 and use.lanes(1) else None

    Args:
        function: the ``autograd.Function``.
        flow: where samples lie in the gradient of input k, given where they lie in the cotangents; by default this is
            found out by running the backward.

    Returns:
        A decorator that enters the rule and gives it back.
    """

    def enter(rule: Rule) -> Rule:
        if function in _TAUGHT:
            raise ValueError(f"{function.__name__} already has a rule")
        _TAUGHT[function] = Taught(rule, flow)
        return rule

    return enter


def taught(node: Node) -> Taught | None:
    """What is known of a custom node."""
    return _TAUGHT.get(function_of(node)) if is_custom(node) else None
