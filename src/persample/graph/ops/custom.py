"""What users say of functions that PyTorch does not know: custom ``autograd.Function``s and ops of ``torch.library``.

A custom backward may be anything, so the engine asks it by running it: exact, but one call per sample. A rule
registered here says what the backward would, as a factor. And whether the forward keeps samples apart cannot be seen
from outside at all, if it is given data and weights: it can be stated here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch.autograd.graph import Node

from ..read.compiled import is_compiled
from ..read.library import Op as LibraryOp
from ..read.library import op_of, qualified, registered
from ..read.saved import function_of, is_custom
from .table import EVERY, FlowRule, Op, Rule

__all__ = ["COMPILED", "is_known", "is_vouched_for", "keeps_samples_apart", "taught", "teach"]


class Compiled:
    """All that ``torch.compile`` has made."""

    def __repr__(self) -> str:
        return "persample.graph.COMPILED"


COMPILED: Final = Compiled()

Key = type | str | Compiled  # a Function, the qualified name of an op, or all compiled regions
Taken = type[torch.autograd.Function] | LibraryOp
T = TypeVar("T", bound="type[torch.autograd.Function] | LibraryOp | Compiled")

_TAUGHT: dict[Key, Op] = {}
_APART: set[Key] = set()


def teach(function: Taken, flow: FlowRule | None = None) -> Callable[[Rule], Rule]:
    """Enter a rule for a custom Function, or for an op of ``torch.library`` (``register_autograd``).

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
    ...     return Dense(use.rows(1).sum(use.g * x)) if use.k == 1 and use.rows(1) else None

    Args:
        function: the ``autograd.Function``; or what ``torch.library.custom_op`` returned, an ``OpOverloadPacket``, an
            ``OpOverload``, or the op's qualified name (``"mylib::myop"``).
        flow: where samples lie in the gradient of input k, given where they lie in the cotangents; by default this is
            found out by running the backward.

    Returns:
        A decorator that enters the rule and gives it back.

    Raises:
        ValueError: it already has a rule, or there is no op of this name.
    """
    key = _key(function)

    def enter(rule: Rule) -> Rule:
        enter_op(key, rule, flow)
        return rule

    return enter


def keeps_samples_apart(function: T) -> T:
    """State that a function's results for one sample do not depend on other samples.

    Where ``independent=True`` or private training would refuse a function that is given data and weights, because its
    inside cannot be seen, this is taken for true: with all it implies. A gradient that shows otherwise is refused all
    the same, and wherever parts of a batch are run again (the guard of private training, ``persample audit``), that run
    checks the statement.

    >>> import torch, warnings, persample as ps
    >>> from persample.graph import COMPILED, keeps_samples_apart
    >>> @keeps_samples_apart
    ... class Scale(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x, weight):
    ...         ctx.save_for_backward(x, weight)
    ...         return x * weight
    ...
    ...     @staticmethod
    ...     def backward(ctx, g):
    ...         x, weight = ctx.saved_tensors
    ...         return g * weight, (g * x).sum(0)
    >>> weight = torch.ones(3, requires_grad=True)
    >>> losses = Scale.apply(torch.ones(2, 3), weight).sum(1)
    >>> with warnings.catch_warnings(action="ignore"):  # it is not taught, and slow
    ...     ps.norms(losses, [weight], independent=True)
    tensor([1.7321, 1.7321])
    >>> keeps_samples_apart(COMPILED)  # doctest: +SKIP

    Args:
        function: an ``autograd.Function`` (not those that inherit from it), an op of ``torch.library`` in any of the
            forms that `teach` takes, or ``persample.graph.COMPILED`` for whatever ``torch.compile`` makes.

    Returns:
        The same, so that it can be a decorator.
    """
    _APART.add(function if isinstance(function, Compiled) else _key(function))
    return function


def enter_op(key: Key, rule: Rule | None, flow: FlowRule | None) -> None:
    """Enter what is known of a Function or an op of ``torch.library``, by its key."""
    if key in _TAUGHT:
        raise ValueError(f"{_shown(key)} already has a rule")
    flows = {} if flow is None else {EVERY: flow}
    _TAUGHT[key] = Op(name=_shown(key), rule=rule, flow=flows, all_cotangents=True)


def taught(node: Node) -> Op | None:
    """What is known of a custom node."""
    return _TAUGHT.get(_key_of(node)) if is_custom(node) else None


def is_known(node: Node) -> bool:
    """Has somebody said of an opaque node what it does, or that it keeps samples apart?

    What is read from the backward of a compiled region does not show what its forward pass has computed values from.
    """
    return is_vouched_for(node) or (taught(node) is not None and not is_compiled(node))


def is_vouched_for(node: Node) -> bool:
    """Has somebody stated of an opaque node that it keeps samples apart?"""
    return is_custom(node) and _key_of(node) in _APART


def _key_of(node: Any) -> Key:
    return COMPILED if is_compiled(node) else op_of(node) or function_of(node)


def _key(function: object) -> Key:
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        return function
    name = qualified(function)
    if name is None:
        raise TypeError(
            f"expected an autograd.Function, an op of torch.library or its name ('mylib::myop'), not {function!r}; for "
            f"what torch.compile makes, which has no names, keeps_samples_apart(persample.graph.COMPILED)"
        )
    if not registered(name):
        raise ValueError(f"there is no op {name!r}: import the module that registers it first")
    return name


def _shown(key: Key) -> str:
    return key.__name__ if isinstance(key, type) else str(key)
