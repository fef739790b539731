"""The table of ops: what is known of every kind of graph node, and how it is looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import Node

from ..layout import Flow, Layout, Outcome, Shape
from ..read.nodes import NodeSlot, op_name
from ..read.saved import is_custom

if TYPE_CHECKING:
    from ...factors import Factor
    from ..read.site import Site
    from .use import Use

Layouts = Sequence[Layout | None]
FlowRule = Callable[["Site", int, Layouts], Outcome]
Rule = Callable[["Use"], "Factor | None"]
Lift = Callable[["Site", "Factor", Shape], "Factor | None"]
Through = Callable[["Site", int, "Factor"], "Factor | None"]

EVERY = -1  # stands for every operand that has no flow of its own


class Undecided(Exception):
    """A flow or a rule was asked about shapes or cotangents that it is not written for."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two operands, with letters for dims.

    n: batch of matrices, i: rows of the result, j: its columns, k: the dim that the forward product sums over.
    """

    result: str
    operands: Mapping[int, str]  # by backward output
    saved: tuple[str, str]  # the names under which a node keeps its operands, in the same order


@dataclass(frozen=True, slots=True)
class Rowwise:
    """A rule that treats rows apart from one another, so that one call may serve several nodes."""

    reads: Mapping[int, tuple[str, ...]]  # backward output -> the saved tensors that are read row by row
    options: tuple[str, ...] = ()  # what the nodes must have in common
    by_last_dims: bool = False  # the last dims of a cotangent are those of the parameters, and rows the ones before


@dataclass(frozen=True, slots=True)
class Aten:
    """A call in the backward of a compiled region that computes what nodes of an op would.

    An aten op that is applied to cotangents is the backward of another op, mostly of another name: ``slice_scatter`` is
    that of ``Slice``, ``permute`` that of ``Permute`` with the inverse order.
    """

    name: str  # with the overload: ``mm.default``
    cotangents: tuple[str, ...]  # the arguments that are cotangents
    output: int | None = 0  # which backward output it returns; None: all of them, in order
    zeros: str | None = None  # the argument into which it writes, which must be zeros
    # What the node would have saved, if that is not the argument of the same name: from a way to get arguments.
    saved: Mapping[str, Callable[[Callable[[str], Any]], Any]] = field(default_factory=dict)
    where: Callable[[Callable[[str], Any]], bool] | None = None  # must hold of the arguments


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Op:
    """All that is known of one kind of node; by default nothing, as of ops without an entry."""

    name: str = ""
    aten: tuple[Aten, ...] = ()  # the calls by which compiled regions compute its backward
    # Where samples go, by backward output; outputs that are not named are left to the data of the call.
    flow: Mapping[int, FlowRule] = field(default_factory=dict)
    by_shape: bool = False  # the flow depends on nothing but shapes, and is the same for all operands
    # What the gradients of its parameters are made of.
    rule: Rule | None = None
    all_cotangents: bool = False  # the rule knows what to do with other cotangents than the first
    rowwise: Rowwise | None = None
    # What the engine is to give the node in place of its cotangents, after the rule: for fused ops, which would
    # compute sums that nobody wants. It is told where ordinary gradients are wanted.
    instead: Callable[[Site, Sequence[Tensor | None], Sequence[NodeSlot]], Sequence[Tensor | None] | None] | None = None
    # How B cotangents pass through it, where all samples share what it computes.
    lift: Lift | None = None
    # The same for ops of several operands, by backward output: a factor of the operand that keeps its structure.
    through: Mapping[int, Through] = field(default_factory=dict)
    pull: Callable[[Site, Tensor], dict[int, Factor]] | None = None  # the factors of all operands, from one stack
    vmap: bool = False  # its backward was seen to give the same numbers under vmap as in a loop
    # What to do instead, where PyTorch cannot differentiate its backward; None: it can.
    once: Callable[[Site], str | None] | None = None
    # What kind of op it is.
    pointwise: bool = False  # elementwise: the result has the operands' shape, but for broadcasting
    product: Product | None = None
    convolution: bool = False
    view: bool = False  # a view or cast of one whole tensor
    in_place: bool = False  # an op on a view of a tensor that was changed in place
    section: bool = False  # reads part of a tensor: what it did not read is nobody's, even if the rest is one sample's
    ranks: bool = False  # a sample's place in the result depends on the others' numbers
    counts_reads: bool = False  # may divide gradients by how often the whole batch reads a row
    shape_follows: bool = False  # the shape of the result follows from those of the operands, if all are in the graph
    shares_memory: bool = False  # the result takes no memory of its own
    has_options: bool = True  # nodes of this kind may differ in more than shapes
    # The dims of its result that may be the batch's though no operand shows it: reads by index, expansion to B rows.
    new_rows: Callable[[Node, Shape], Sequence[int]] | None = None
    # The dims of its result that are those of the integers by which the rows of a table are read.
    read_dims: Callable[[Site], list[int] | None] | None = None
    # The shape of its result, with channels split by group, and the dims of it along which results have data in common.
    mixed_dims: Callable[[Site], tuple[Shape, Shape]] | None = None
    # The same where it is no matter of dims, of packed sequences: are there such data of results of several samples?
    mixes: Callable[[Site, Layout], bool] | None = None
    # Of a batch norm: does it go by the statistics of the batch?
    averages_batch: Callable[[Site], bool] | None = None
    # The name under which it saves its data, and how many of their first dims its result keeps (0: all).
    saved_data: tuple[str, int] | None = None

    def where(self, site: Site, k: int, layouts: Layouts) -> Outcome:
        """Where the samples lie in backward output k; `Flow.PROBE` where sizes and dims do not decide."""
        flow = self.flow.get(k) or self.flow.get(EVERY)
        if flow is None:
            return Flow.PROBE
        try:
            return flow(site, k, layouts)
        except Undecided:
            return Flow.PROBE

    def factor(self, use: Use) -> Factor | None:
        """What the gradient of a parameter is made of; None where no rule says."""
        if self.rule is None or not (self.all_cotangents or all(g is None for g in use.cotangents[1:])):
            return None
        try:
            return self.rule(use)
        except Undecided:
            return None


def always(remedy: str) -> Callable[[Site], str | None]:
    """The remedy for every node of an op."""
    return lambda site: remedy


UNKNOWN = Op()
_ENTRIES: dict[str, Op] = {}
_BY_TYPE: dict[type, Op] = {}  # of nodes that have been looked up; no classes of users


def op(names: str, *, flow: FlowRule | Mapping[int, FlowRule] | None = None, **known: Any) -> None:
    """Enter what is known of the nodes of these names, separated by spaces.

    Args:
        names: those of the node types, without the ending ``Backward0``.
        flow: where samples go in the gradient of the first operand; or one flow for each operand, of which those that
            are not named are left to the data of a call. ``{EVERY: flow}`` is for all operands.
        **known: any other fields of `Op`.

    Raises:
        ValueError: one of the names has an entry already.
    """
    flows = flow if isinstance(flow, Mapping) else {} if flow is None else {0: flow}
    new = {name: Op(name=name, flow=flows, **known) for name in names.split()}
    for name in new.keys() & _ENTRIES:
        raise ValueError(f"{name} already has an entry: say all that is known of it there")
    _ENTRIES.update(new)
    _BY_TYPE.clear()


def lookup(node: Node) -> Op:
    """What is known of a node's op; `UNKNOWN` if it has no entry, and for users' own Functions."""
    known = _BY_TYPE.get(type(node))
    return _lookup(node) if known is None else known


def _lookup(node: Node) -> Op:
    entry = _ENTRIES.get(op_name(node), UNKNOWN)
    if is_custom(node) or type(node).__name__ == "CppFunction":  # a class of the user's, or one for many ops
        return entry
    return _BY_TYPE.setdefault(type(node), entry)


def named(name: str) -> Op:
    """The entry of one name, or `UNKNOWN`."""
    return _ENTRIES.get(name, UNKNOWN)


def aten_calls() -> dict[str, list[tuple[Op, Aten]]]:
    """What calls of aten ops compute, by the name of the aten op."""
    found: dict[str, list[tuple[Op, Aten]]] = {}
    for entry in entries():
        for call in entry.aten:
            found.setdefault(call.name, []).append((entry, call))
    return found


def entries() -> Iterator[Op]:
    """All entries."""
    yield from _ENTRIES.values()
