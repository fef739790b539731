"""Following samples through the backward graph of a compiled region."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import fx

from ...factors import Dense, Factor
from ...numberless import NoNumbers
from ..layout import Flow, Layout, Shape, carry, join, labels, reshape, simplify
from ..ops.broadcast import dense
from ..ops.dims import but, of_same_size
from ..ops.table import Aten, Op, aten_calls
from ..ops.use import Use
from ..read.compiled import Unreadable, named_arguments
from .linear import is_new, is_zero, linear_in, written_over
from .site import CallSite
from .states import Computed, NoFactor, Separable, State, States, Summed, one_shape, unknown, value_of
from .sums import of_sums, pulled


@cache
def calls_by_name() -> Mapping[str, Sequence[tuple[Op, Aten]]]:
    """The calls that ops of the table say something of."""
    return aten_calls()


class Reader:
    """What is known of every node of one graph, for cotangents whose samples lie as given."""

    def __init__(self, graph: fx.GraphModule, layouts: Mapping[fx.Node, Layout], batch: int) -> None:
        self.batch = batch
        self.states: dict[fx.Node, States] = {}
        for node in graph.graph.nodes:
            if node.op == "call_function":
                self.states[node] = self._call(node) if self._live(node) else None
            elif node.op == "output":
                self.outputs: Sequence[Any] = list(node.args[0])
            else:
                self.states[node] = Separable(layouts[node]) if node in layouts else None

    def state(self, node: Any) -> State:
        """That of one tensor; anything that is no node is a number, which depends on nothing."""
        found = self.states.get(node) if isinstance(node, fx.Node) else None
        if isinstance(found, tuple):
            raise Unreadable(f"{node}, several tensors at once")
        return found

    def _live(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if self.states[n] is not None]

    def _call(self, node: fx.Node) -> States:
        if node.target is operator.getitem:
            several = self.states[node.args[0]]  # type: ignore[index]
            if not isinstance(several, tuple):
                raise Unreadable(f"{node}, a part of {node.args[0]}")
            return several[node.args[1]]  # type: ignore[index]
        if is_new(node):
            return None
        written = written_over(node)
        if written is not None:
            return self.state(written)
        results = value_of(node)
        for result in results if isinstance(results, (list, tuple)) else [results]:
            if result is not None and (result.is_complex() or not result.is_floating_point()):
                raise Unreadable(f"{node.target}, whose result is {result.dtype}")
        if any(isinstance(self.state(n), Summed) for n in self._live(node)):
            return self._of_sums(node)
        for call in (self._by_hand, self._linear, self._by_table):
            found = call(node)
            if found is not None:
                return found
        raise unknown(node)

    def _of_sums(self, node: fx.Node) -> States:
        """A call on what is summed over samples, which those that samples divide up must not meet."""
        if any(not isinstance(self.state(n), Summed) for n in self._live(node)):
            raise Unreadable(f"{node.target}, where a sum over samples comes back to samples")
        reading = None
        for op, aten in calls_by_name().get(str(node.target).removeprefix("aten."), ()):
            site = CallSite(node, op, aten, value_of)
            if op.pull is not None and self._fits(site, aten):
                (summed,) = [state for n in self._live(node) if isinstance(state := self.state(n), Summed)]
                return pulled(node, op, aten, summed)
            if op.lift is not None and aten.output == 0 and len(site.cotangents) == 1 and self._fits(site, aten):
                reading = op, aten
        return of_sums(
            node, {n: state for n in self._live(node) if isinstance(state := self.state(n), Summed)}, reading
        )

    # Calls on cotangents that samples divide up.

    def _linear(self, node: fx.Node) -> State:
        """Elementwise: samples stay where they are, and whatever is broadcast along them goes with them."""
        if not linear_in(node, self._live(node)):
            return None
        found: Layout | None = None
        shape = one_shape(node)
        for operand in self._live(node):
            layout = self._broadcast(operand, shape)
            joined = layout if found is None else join(found, layout, shape)
            if joined is None:
                raise Unreadable(f"{node.target}, in which samples meet")
            found = joined
        return None if found is None else Separable(found)

    def _broadcast(self, operand: fx.Node, shape: Shape) -> Layout:
        """Where samples lie when a tensor of theirs is broadcast."""
        state = self.state(operand)
        assert isinstance(state, Separable)
        return broadcast(operand, state.layout, shape)

    def _by_hand(self, node: fx.Node) -> State:
        """The few calls that are no backward of an op with an entry."""
        by_hand = _BY_HAND.get(str(node.target).removeprefix("aten."))
        if by_hand is None:
            return None
        operand = named_arguments(node)["self"]
        state = self.state(operand)
        if self._live(node) != [operand] or not isinstance(state, Separable):
            raise unknown(node)
        return by_hand(node, operand, state.layout)

    def _by_table(self, node: fx.Node) -> States:
        for op, aten in calls_by_name().get(str(node.target).removeprefix("aten."), ()):
            site = CallSite(node, op, aten, value_of)
            if self._fits(site, aten):
                return self._outcomes(node, op, aten, site)
        return None

    def _fits(self, site: CallSite, aten: Aten) -> bool:
        """Are cotangents at the places of cotangents alone? What is there without being one must be zeros."""
        cotangents = site.cotangents
        if any(self.states[n] is not None for n in site.others):
            return False
        if not all(self.state(c) is not None or is_zero(c) for c in cotangents):
            return False
        if aten.zeros is not None and not is_zero(site.argument(aten.zeros)):
            return False
        return aten.where is None or aten.where(site.read)

    def _outcomes(self, node: fx.Node, op: Op, aten: Aten, site: CallSite) -> States:
        layouts = []
        for c in site.cotangents:
            state = self.state(c)
            layouts.append(state.layout if isinstance(state, Separable) else None)
        if aten.output is not None:
            return self._outcome(node, op, aten, site, layouts, aten.output)
        return tuple(
            None if result is None else self._outcome(node, op, aten, site, layouts, k)
            for k, result in enumerate(value_of(node))
        )

    def _outcome(
        self, node: fx.Node, op: Op, aten: Aten, site: CallSite, layouts: Sequence[Layout | None], k: int
    ) -> State:
        try:
            outcome = op.where(site, k, layouts)
        except NoNumbers:
            raise unknown(node) from None
        if isinstance(outcome, Layout):
            return Separable(outcome)
        if op.rule is None or outcome is not Flow.SHARED:
            raise unknown(node)

        def build(values: Computed) -> Factor:
            at = CallSite(node, op, aten, values)
            given = [None if layout is None else values(c) for c, layout in zip(at.cotangents, layouts, strict=True)]
            factor = op.factor(Use(at, k, given, layouts, self.batch))
            if factor is None:
                raise NoFactor(f"{node.target} on tensors of shapes {site.shapes}")
            return factor

        return Summed(tuple(node.all_input_nodes), build)


# Calls that are no backward of an op with an entry, on one tensor that samples divide up.


def broadcast(operand: fx.Node, layout: Layout, shape: Shape) -> Layout:
    """Where samples lie when a tensor of theirs is broadcast to a shape."""
    here = one_shape(operand)
    if here == shape:
        return layout
    more = len(shape) - len(here)
    to_dims = [d + more if shape[d + more] == n else None for d, n in enumerate(here)]
    return _stays(operand, carry(layout, here, shape, to_dims))


def _stays(call: fx.Node, moved: Layout | None) -> Layout:
    if moved is None:
        raise Unreadable(f"{call.target} along samples")
    return moved


def _expanded(call: fx.Node, operand: fx.Node, layout: Layout) -> State:
    return Separable(broadcast(operand, layout, one_shape(call)))


def _summed(call: fx.Node, operand: fx.Node, layout: Layout) -> State:
    """The backward of an expansion: of each sample's part alone, where it sums over samples."""
    shape, target, over = one_shape(operand), one_shape(call), named_arguments(call).get("dim")
    dims = {d % len(shape) for d in over or range(len(shape))}
    kept = tuple(1 if d in dims else n for d, n in enumerate(shape))
    moved = carry(layout, shape, kept, but(shape, *dims))
    if moved is not None:
        return Separable(reshape(moved, kept, target))
    dtype = value_of(call).dtype

    def build(values: Computed) -> Factor:
        stack = dense(values(operand), layout, kept, dtype).stack()
        return Dense(stack.reshape(len(stack), *target))

    return Summed((operand,), build)


def _averaged(call: fx.Node, operand: fx.Node, layout: Layout) -> State:
    """A mean over what is one sample's; over samples, it is not what the sum is."""
    found = _summed(call, operand, layout)
    if isinstance(found, Summed):
        raise Unreadable(f"{call.target} over samples")
    return found


def _cut(call: fx.Node, operand: fx.Node, layout: Layout) -> State:
    """Part of one dim, or elements of it by index: the others stay."""
    shape, target = one_shape(operand), one_shape(call)
    if not shape:
        raise unknown(call)
    given = named_arguments(call)
    dim = given["dim"] % len(shape)
    moved = carry(layout, shape, target, of_same_size(shape, target, but(shape, dim)))
    if moved is None and "start" in given:
        index = labels(layout, shape)
        index = index[(slice(None),) * dim + (slice(given["start"], given["end"], given["step"]),)]
        moved = simplify(index, target, layout.batch)
    return Separable(_stays(call, moved))


def _picked(call: fx.Node, operand: fx.Node, layout: Layout) -> State:
    """One place of one dim."""
    shape = one_shape(operand)
    dim = named_arguments(call)["dim"] % len(shape)
    to_dims = [None if d == dim else d - (d > dim) for d in range(len(shape))]
    moved = carry(layout, shape, one_shape(call), to_dims)
    if moved is None:
        place = named_arguments(call)["index"]
        moved = simplify(labels(layout, shape).select(dim, place), one_shape(call), layout.batch)
    return Separable(moved)


_BY_HAND = {
    "sum.default": _summed,
    "sum.dim_IntList": _summed,
    "mean.dim": _averaged,
    "expand.default": _expanded,
    "slice.Tensor": _cut,
    "gather.default": _cut,
    "index_select.default": _cut,
    "select.int": _picked,
}
