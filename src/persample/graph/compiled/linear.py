"""Elementwise calls that are linear in their cotangents, and calls that compute zeros.

The backward of a sample alone is the backward with zeros for all others. So whatever is done to cotangents must make
zeros of zeros: sums of them, and products with what does not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...numberless import has_numbers
from ..read.compiled import named_arguments

SUMS = ("aten.add.Tensor", "aten.sub.Tensor")
_PRODUCTS = ("aten.mul.Tensor", "aten.mul.Scalar")
_QUOTIENTS = ("aten.div.Tensor", "aten.div.Scalar")
_PRODUCT_AND_SUM = "prims.fma.default"  # a · b + c
_CHOICE = "aten.where.self"

_FILLED = {  # the argument that says with what
    "aten.full.default": "fill_value",
    "aten.full_like.default": "fill_value",
    "aten.new_full.default": "fill_value",
    "aten.scalar_tensor.default": "s",
}
_ZEROS = ("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default")
_NEW = (
    *("new_zeros.", "new_ones.", "new_full.", "new_empty.", "new_empty_strided."),
    *("zeros_like.", "ones_like.", "full_like.", "empty_like."),
)
_PASSING = (
    "alias clone detach expand permute reshape squeeze t transpose unsqueeze view _to_copy _unsafe_view slice"
    " convert_element_type"
).split()


def linear_in(call: fx.Node, live: Sequence[fx.Node]) -> bool:
    """Is this an elementwise call that is linear in the operands that are ``live``, taken together?"""
    name, arguments = str(call.target), list(call.args)
    if name in SUMS:
        return all(a in live or is_zero(a) for a in arguments[:2])
    if name in _PRODUCTS:
        return sum(a in live for a in arguments) == 1
    if name == _PRODUCT_AND_SUM:
        return sum(a in live for a in arguments[:2]) == 1 and (arguments[2] in live or is_zero(arguments[2]))
    if name in _QUOTIENTS or name == "aten.neg.default":
        return arguments[0] in live and not any(a in live for a in arguments[1:])
    if name == _CHOICE:
        return arguments[0] not in live and all(a in live or is_zero(a) for a in arguments[1:])
    if is_elementwise(call) and name.endswith("_backward.default"):  # whose first argument is the cotangent
        return arguments[0] in live and not any(n in live for a in arguments[1:] for n in _nodes(a))
    return False


def is_elementwise(call: fx.Node) -> bool:
    """Does PyTorch say of this op that it treats elements apart?"""
    return torch.Tag.pointwise in getattr(call.target, "tags", ())


def is_new(call: fx.Node) -> bool:
    """Is this a new tensor, of whose operand only the shape or the dtype is asked for?"""
    return str(call.target).removeprefix("aten.").startswith(_NEW)


def written_over(call: fx.Node) -> fx.Node | None:
    """What a call copies to all places of another tensor, of which nothing is left; None of all other calls."""
    if str(call.target) != "aten.copy.default":
        return None
    old, new = call.args[:2]
    alike = isinstance(old, fx.Node) and isinstance(new, fx.Node) and _kind(old) == _kind(new)
    return new if alike and isinstance(new, fx.Node) else None


def _kind(node: fx.Node) -> Any:
    return node.meta["val"].shape, node.meta["val"].dtype


def is_zero(value: Any) -> bool:
    """Is this zero, or a call that computes zeros and nothing else?"""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float)) and value == 0
    if value.op != "call_function":
        return value.op == "get_attr" and _is_zero_constant(value)
    name = str(value.target)
    if name in _ZEROS:
        return True
    if name in _FILLED:
        return is_zero(named_arguments(value)[_FILLED[name]])
    return name.split(".")[1:2] != [] and name.split(".")[1] in _PASSING and is_zero(value.args[0])


def _is_zero_constant(attribute: fx.Node) -> bool:
    """Compilers compute zeros ahead, once for all calls."""
    constant = getattr(attribute.graph.owning_module, str(attribute.target), None)
    return isinstance(constant, Tensor) and has_numbers(constant) and not bool(constant.any())


def _nodes(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return found
