"""The autograd graph below the losses, as a flat list: every node after all that feed it cotangents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from .._errors import UnsupportedError
from ..distributed.wrappers import WRAPPER_FUNCTIONS
from .layout import Shape
from .library import op_of
from .saved import function_of, is_custom, is_torchs, metadata

Slot = tuple[Node, int]  # a node's cotangent number nr: the gradient of the forward op's output nr


@dataclass(slots=True)
class Tape:
    """Nodes that lead to a requested parameter, from the losses down."""

    order: list[Node]
    edges: dict[Node, tuple[Slot | None, ...]]  # per backward output; None where nothing requested lies beyond
    leaves: dict[Node, Tensor]  # AccumulateGrad nodes of requested parameters
    others: list[Node] = field(default_factory=list)  # AccumulateGrad nodes that nobody asked for
    fed: set[Node] = field(default_factory=set)  # nodes with an operand that leads to no parameter: data, or a number
    data: Collection[Node] = ()  # leaves among them that are no weights
    doubtful: Collection[Node] = ()  # leaves that may be weights, or data that carry a gradient
    weights: dict[Node, bool] = field(default_factory=dict)  # whether all below a node is computed from weights alone
    _shapes: dict[Node, tuple[Shape, ...]] = field(default_factory=dict)

    def shapes(self, node: Node) -> tuple[Shape, ...]:
        """The shapes of a node's cotangents."""
        found = self._shapes.get(node)
        if found is None:
            found = self._shapes[node] = _shapes_of(node)
        return found

    def shape(self, slot: Slot) -> Shape:
        """The shape of one cotangent."""
        return self.shapes(slot[0])[slot[1]]

    def reaches(self, node: Node, test: Callable[[Node], bool]) -> bool:
        """Does ``test`` hold for this node or for one below it?"""
        stack, seen = [node], {node}
        while stack:
            here = stack.pop()
            if test(here):
                return True
            for slot in self.edges[here]:
                if slot is not None and slot[0] not in seen:
                    seen.add(slot[0])
                    stack.append(slot[0])
        return False

    def below(self, node: Node) -> set[Node]:
        """This node and all below it."""
        stack, seen = [node], {node}
        while stack:
            for slot in self.edges[stack.pop()]:
                if slot is not None and slot[0] not in seen:
                    seen.add(slot[0])
                    stack.append(slot[0])
        return seen


def _shapes_of(node: Node) -> tuple[Shape, ...]:
    about = metadata(node)
    if any(m.is_nested_tensor for m in about):
        raise UnsupportedError(
            f"the result of {op_name(node)} is a nested tensor, in which rows have no place of their own: give the "
            f"model a padded tensor (torch.nested.to_padded_tensor), or all rows as one tensor of shape (N, ...) "
            f"(torch.cat(x.unbind()), or x.values() if it is jagged) and add up losses by sample with index_add"
        )
    return tuple(tuple(m.shape) for m in about)


def op_name(node: Node) -> str:
    """``AddmmBackward0`` and its like without the suffix: the name rules are registered under.

    Those of custom Functions stand under none of these names.
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
    """No rule is registered under a name with a space, whatever users call their Functions."""
    if is_torchs(node, *_KNOWN):
        return _strip(type(node).__name__)
    return f"custom {op_of(node) or function_of(node).__name__}"


_KNOWN = (*WRAPPER_FUNCTIONS, "CompiledFunction")
_NAMES: dict[type, str] = {}


def _strip(name: str) -> str:
    return name.rstrip("0123456789").removesuffix("Backward")


def is_leaf(node: Node) -> bool:
    """Does this node stand for a leaf tensor?"""
    return type(node).__name__ == "AccumulateGrad"


leaf_of: Callable[[Node], Tensor] = attrgetter("variable")  # the tensor that a leaf node stands for


Below = Callable[[Node], Sequence[tuple[Node | None, int]]]  # where a node's edges lead to
edges_of: Below = attrgetter("next_functions")


def walk(roots: Iterable[Node], params: Iterable[Tensor], edges_below: Below = edges_of) -> Tape:
    """Read the graph below ``roots`` once, without recursion."""
    wanted = {id(p) for p in params}
    needed: dict[Node, bool] = {}
    leaves: dict[Node, Tensor] = {}
    others: list[Node] = []
    after: list[Node] = []  # children before parents
    children: dict[Node, Sequence[tuple[Node | None, int]]] = {}
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            needed[node] = any(needed[c] for c, _ in children[node] if c is not None)
            if needed[node]:
                after.append(node)
            continue
        if node in children:
            continue
        below = children[node] = edges_below(node)
        if is_custom(node) and hasattr(node, "run_function"):  # as those of other libraries call it, too
            raise UnsupportedError(
                "the graph holds a reentrant checkpoint (use_reentrant=True) at a place where the ops inside it cannot "
                "be seen: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if not below and is_leaf(node):
            variable = leaf_of(node)
            needed[node] = id(variable) in wanted
            if needed[node]:
                leaves[node] = variable
                after.append(node)
            else:
                others.append(node)
            continue
        stack.append((node, True))
        stack += [(child, False) for child, _ in below if child is not None and child not in children]
    edges = {
        node: tuple((c, nr) if c is not None and needed[c] else None for c, nr in children[node]) for node in after
    }
    fed = {node for node in after if None in edges[node] and not is_leaf(node)}
    after.reverse()
    return Tape(after, edges, leaves, others, fed)


def leading_to(roots: Iterable[Node], goals: Iterable[Node | None], below: Below = edges_of) -> set[Node]:
    """All nodes from which one of ``goals`` is reached."""
    above: dict[Node, list[Node]] = {root: [] for root in roots}
    stack = list(above)
    while stack:
        node = stack.pop()
        for child, _ in below(node):
            if child is not None:
                if child not in above:
                    above[child] = []
                    stack.append(child)
                above[child].append(node)
    stack, found = [goal for goal in goals if goal in above], set()
    while stack:
        for node in above[stack.pop()]:
            if node not in found:
                found.add(node)
                stack.append(node)
    return found


def share_nodes(a: Tensor, b: Tensor) -> bool:
    """Were two tensors computed from a common one, other than leaves?"""
    mine = inner_nodes(a)
    return not mine.isdisjoint(inner_nodes(b))


def inner_nodes(t: Tensor) -> set[Node]:
    """All nodes of a tensor's graph but the leaves."""
    stack, seen = [t.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen and not is_leaf(node):
            seen.add(node)
            stack += [child for child, _ in node.next_functions]
    return seen
