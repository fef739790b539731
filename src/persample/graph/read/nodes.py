"""What kind of thing one node of PyTorch's graph is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ...distributed.tensor_parallel import DTENSOR_FUNCTIONS, changes_placements
from ...distributed.wrappers import WRAPPER_FUNCTIONS, passes_on
from ...traverse import ordered
from .library import op_of
from .saved import function_of, is_custom, is_torchs

NodeSlot = tuple[Node, int]  # a node of PyTorch's graph, and which of its cotangents


def op_name(node: Node) -> str:
    """``AddmmBackward0`` and its like without the suffix: the name under which an op has its entry in the table.

    Custom Functions have names of another form, under which there are no entries.
    """
    kind = type(node)
    name = _NAMES.get(kind)
    if name is None:
        if kind.__name__ == "CppFunction":  # the one type of all C++ nodes that PyTorch has not made a class for
            return f"C++ {_strip(node.name())}"
        if is_custom(node):  # whose class may hold a model, and is not to be kept
            return _custom_name(node)
        name = _NAMES[kind] = _strip(kind.__name__)
    return name


def _custom_name(node: BackwardCFunction) -> str:
    """No entry has a name with a space, whatever users call their Functions."""
    if is_torchs(node, *_KNOWN):
        return _strip(type(node).__name__)
    return f"custom {op_of(node) or function_of(node).__name__}"


_KNOWN = (*WRAPPER_FUNCTIONS, *DTENSOR_FUNCTIONS, "CompiledFunction")
_NAMES: dict[type, str] = {}


def _strip(name: str) -> str:
    return name.rstrip("0123456789").removesuffix("Backward")


def is_leaf(node: Node) -> bool:
    """Does this node stand for a leaf tensor?"""
    return type(node).__name__ == "AccumulateGrad"


leaf_of: Callable[[Node], Tensor] = attrgetter("variable")  # the tensor that a leaf node stands for


def is_opaque(node: Node) -> bool:
    """A custom ``autograd.Function``, in Python or C++, or a compiled region: its backward may be anything."""
    known = _OPAQUE.get(type(node))
    return _is_opaque(node) if known is None else known


_OPAQUE: dict[type, bool] = {}  # of PyTorch's own ops and wrappers


def _is_opaque(node: Node) -> bool:
    kind = type(node)
    if kind.__name__ == "CppFunction":  # one type for many
        return "CppNode" in node.name()
    if passes_on(node) or changes_placements(node):
        return _OPAQUE.setdefault(kind, False)
    return is_custom(node) or _OPAQUE.setdefault(kind, False)


def children(node: Node) -> Iterator[Node]:
    """The nodes that a node's outputs go to."""
    return (child for child, _ in node.next_functions if child is not None)


def share_nodes(a: Tensor, b: Tensor) -> bool:
    """Were two tensors computed from a common one, other than leaves?"""
    mine, theirs = (ordered([] if t.grad_fn is None else [t.grad_fn], children) for t in (a, b))
    return any(not is_leaf(node) for node in set(mine).intersection(theirs))
