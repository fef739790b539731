"""The part of a compiled region's backward that factors are made from, as a program of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, fx

from ...factors import Factor
from ..layout import Layout
from ..read.compiled import Backward, Unreadable, refuse_effects, retraced, simpler_ops
from .part import Part
from .reader import Reader, calls_by_name
from .states import State, Summed

_VIEWS = ("aten.view.default", "aten._unsafe_view.default")


class Program:
    """A backward graph traced again for arguments of certain shapes, and what is known of it for certain layouts."""

    def __init__(
        self, backward: Backward, arguments: Sequence[Any], layouts: Sequence[Layout | None], batch: int
    ) -> None:
        refuse_effects(backward.graph)
        self._inductor = backward.inductor
        self._tensors = [k for k, a in enumerate(arguments) if isinstance(a, Tensor)]
        graph = _traced_again(backward.graph, arguments, self._tensors)
        self._graph, self._inputs = graph, [n for n in graph.graph.nodes if n.op == "placeholder"]
        first = len(arguments) - len(layouts)
        given = {k: layout for k, layout in enumerate(layouts, first) if layout is not None}
        places = dict(zip(self._tensors, self._inputs, strict=True))
        if any(k not in places for k in given):
            raise Unreadable("a cotangent that is no tensor")
        self._reader = Reader(graph, {places[k]: layout for k, layout in given.items()}, batch)
        self._parts: dict[tuple[int, ...], Part] = {}

    @property
    def count(self) -> int:
        """How many outputs the backward has."""
        return len(self._reader.outputs)

    def state(self, output: int) -> State:
        """What is known of an output."""
        return self._reader.state(self._reader.outputs[output])

    def factors(self, arguments: Sequence[Any], outputs: Iterable[int], *, apart: bool) -> Mapping[int, Factor | str]:
        """The factors of these outputs, or why there are none, in memory ``apart`` from that of the arguments."""
        return self._part(outputs).factors([arguments[k] for k in self._tensors], apart=apart)

    def built(self, tensors: Sequence[Tensor], outputs: Iterable[int]) -> Mapping[int, Factor]:
        """The factors of these outputs from the tensors among the arguments, for a graph that goes on from them."""
        return self._part(outputs).built(tensors)

    def _part(self, outputs: Iterable[int]) -> Part:
        wanted = tuple(outputs)
        part = self._parts.get(wanted)
        if part is None:
            states = {k: state for k in wanted if isinstance(state := self.state(k), Summed)}
            part = self._parts[wanted] = Part(self._graph, self._inputs, states, self._inductor)
        return part


def _traced_again(graph: fx.GraphModule, arguments: Sequence[Any], tensors: Sequence[int]) -> fx.GraphModule:
    """The graph for numbers and strides of this call, in ops of few kinds.

    The compiler may have given saved tensors other strides than it traced the graph with, so that views need not exist.
    """
    copy = deepcopy(graph)
    for node in copy.graph.nodes:
        if str(node.target) in _VIEWS:
            node.op, node.target = "call_method", "reshape"
    copy.recompile()

    def run(*given: Tensor) -> Any:
        full = list(arguments)
        for k, t in zip(tensors, given, strict=True):
            full[k] = t
        return copy(*full)

    for name, constant in [*copy.named_buffers(recurse=False), *vars(copy).items()]:
        if isinstance(constant, Tensor) and not constant.is_contiguous():  # of which ops write to copies
            setattr(copy, name, constant.contiguous())
    try:
        return retraced(run, [arguments[k] for k in tensors], simpler_ops(calls_by_name().keys()))
    except Exception as error:  # of ops that cannot be traced, which may say so in any way
        raise Unreadable(f"something that cannot be traced ({type(error).__name__}: {error})") from error
