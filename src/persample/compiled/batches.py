"""One graph for all batch sizes, found by tracing a few.

The engine computes with sizes as plain integers. So it is traced for three batch sizes, and the three graphs are laid
side by side: if they are the same but for integers that grow linearly with the batch size, one graph with that size as
an unknown stands for all of them. If they are not, as the way that is taken depends on the size, there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isclose
from operator import add, mul, truediv
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..refusal import NotCompiled
from .compilers import Dims, cuts_at_a_number, dims_of, is_linear, losses_length, open_sizes


@dataclass(frozen=True)
class OpenBatch:
    """A captured graph whose inputs have a size that is not fixed, and grows with the number of losses."""

    dims: Sequence[Dims | None]  # of all inputs
    size: str  # its name
    values: dict[str, int]  # of all open sizes
    place: tuple[int, int]  # an input and a dim of it that has this size
    is_linear: bool  # whether all that the graph computes of this size grows linearly with it

    @classmethod
    def of(cls, graph: GraphModule, losses_at: int, inputs: Sequence[Any]) -> OpenBatch | None:
        """None if the number of losses is fixed, or depends on more than one open size."""
        length = losses_length(graph, losses_at)
        dims = dims_of(graph)
        if length is None or dims is None:
            return None
        values = open_sizes(dims, inputs)
        tensors = [(i, known) for i, known in enumerate(dims) if known is not None and not known.is_size]
        places = [(i, d) for i, known in tensors for d, n in enumerate(known.shape) if n.name == length]
        if not places or length not in values:
            return None
        return cls(dims, length, values, places[0], is_linear(graph, length, values))

    @property
    def now(self) -> int:
        """The size in this call."""
        return self.values[self.size]

    def others(self) -> list[int]:
        """Two other sizes to trace."""
        return [2 * self.now + 1, self.now + 1 + self.now // 2]

    def inputs_at(self, size: int, inputs: Sequence[Any]) -> list[Any]:
        """Inputs like these, of another size; nobody looks at their numbers."""
        values = {**self.values, self.size: size}
        return [
            known.like(given, values) if known is not None else given
            for known, given in zip(self.dims, inputs, strict=True)
        ]

    def is_open(self, at: int, dim: int) -> bool:
        """Does this dim of an input grow with the batch?"""
        known = self.dims[at]
        return known is not None and known.shape[dim].name == self.size


def common_graph(graphs: Sequence[GraphModule], sizes: Sequence[int], at: int, dim: int) -> GraphModule:
    """The graph that each of these is for its batch size, which is that of a dim of one of the inputs."""
    merged = Graph()
    lists = [list(g.graph.nodes) for g in graphs]
    if len({len(nodes) for nodes in lists}) > 1:
        raise NotCompiled("the way that is taken depends on the batch size")
    copies: dict[Node, Node] = {}
    merger = _Merger(merged, sizes, copies)
    count = sum(node.op == "placeholder" for node in lists[0])
    for position, alike in enumerate(zip(*lists, strict=True)):
        first = alike[0]
        if any((n.op, n.target) != (first.op, first.target) for n in alike):
            raise NotCompiled("the way that is taken depends on the batch size")
        if first.op == "get_attr" and not _same_constants(graphs, first.target):
            raise NotCompiled("a table of which sample is where depends on the batch size")
        if cuts_at_a_number(alike):
            raise NotCompiled("samples are taken a fixed number at a time")
        args, kwargs = merger.merge([n.args for n in alike]), merger.merge([n.kwargs for n in alike])
        copies[first] = merged.create_node(first.op, first.target, args, kwargs, first.name)
        merger.indices.update(dict.fromkeys(alike, position))
        if position == count - 1:
            placeholders = [n for n in merged.nodes if n.op == "placeholder"]
            merger.size = merged.call_method("size", (placeholders[at], dim))
    made = GraphModule(graphs[0], merged)
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


def _same_constants(graphs: Sequence[GraphModule], target: Any) -> bool:
    first, *rest = [getattr(g, target) for g in graphs]
    if not isinstance(first, Tensor):
        return False
    return all(isinstance(t, Tensor) and t.shape == first.shape and torch.equal(t, first) for t in rest)


class _Merger:
    """Arguments of nodes that are alike, as one: integers become what they are for an unknown batch size."""

    def __init__(self, graph: Graph, sizes: Sequence[int], copies: dict[Node, Node]) -> None:
        self._graph, self._sizes, self._copies = graph, sizes, copies
        self.indices: dict[Node, int] = {}
        self.size: Node | None = None
        self._made: dict[Any, Node] = {}

    def merge(self, values: Sequence[Any]) -> Any:
        """One argument, of what it is in each graph."""
        first = values[0]
        if isinstance(first, Node):
            if len({self.indices.get(v, -1) if isinstance(v, Node) else -2 for v in values}) > 1:
                raise NotCompiled("the way that is taken depends on the batch size")
            return self._copies[first]
        if any(type(v) is not type(first) for v in values):
            raise NotCompiled("the way that is taken depends on the batch size")
        if isinstance(first, (tuple, list)):
            return self._merge_items(values)
        if isinstance(first, dict):
            return {key: self.merge([v[key] for v in values]) for key in first}
        if isinstance(first, slice):
            parts = [self.merge([getattr(v, name) for v in values]) for name in ("start", "stop", "step")]
            return slice(*parts)
        if all(v == first for v in values):
            return first
        if type(first) is int:
            return self._linear(values)
        if type(first) is float:
            return self._reciprocal(values)
        raise NotCompiled(f"an argument depends on the batch size: {first!r}")

    def _merge_items(self, values: Sequence[Any]) -> Any:
        if len({len(v) for v in values}) > 1:
            raise NotCompiled("the way that is taken depends on the batch size")
        return type(values[0])([self.merge(items) for items in zip(*values, strict=True)])

    def _linear(self, values: Sequence[int]) -> Node:
        (x, y), (a, b) = self._sizes[:2], values[:2]
        slope = Fraction(b - a, y - x)
        start = a - slope * x
        fits = all(slope * n + start == v for n, v in zip(self._sizes, values, strict=True))
        if not fits or slope.denominator != 1:
            raise NotCompiled(f"a size does not grow linearly with the batch size: {list(values)} for {self._sizes}")
        return self._expression(int(slope), int(start))

    def _expression(self, slope: int, start: int) -> Node:
        """slope · size + start."""
        assert self.size is not None
        if (slope, start) not in self._made:
            value = self.size if slope == 1 else self._graph.call_function(mul, (self.size, slope))
            self._made[slope, start] = value if not start else self._graph.call_function(add, (value, start))
        return self._made[slope, start]

    def _reciprocal(self, values: Sequence[float]) -> Node:
        """A number that is divided by the batch size."""
        assert self.size is not None
        whole = values[0] * self._sizes[0]
        if not all(isclose(v * n, whole, rel_tol=1e-14) for n, v in zip(self._sizes, values, strict=True)):
            raise NotCompiled(f"a number depends on the batch size: {list(values)} for {self._sizes}")
        return self._graph.call_function(truediv, (whole, self.size))
