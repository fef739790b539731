"""The part of a compiled region's backward that factors are made from, as a program of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, fx

from ..layout import Layout
from ..read.compiled import Backward, Unreadable, compiled_by_inductor, refuse_effects, simpler_ops
from .reader import Reader
from .states import Computed, State, Summed

_VIEWS = ("aten.view.default", "aten._unsafe_view.default")
_SHORT = 1  # runs before it pays to compile


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
        self._parts: dict[tuple[int, ...], _Part] = {}

    @property
    def count(self) -> int:
        """How many outputs the backward has."""
        return len(self._reader.outputs)

    def state(self, output: int) -> State:
        """What is known of an output."""
        return self._reader.state(self._reader.outputs[output])

    def run(self, arguments: Sequence[Any], outputs: Iterable[int], *, apart: bool) -> Computed:
        """Compute what the factors of these outputs are made from, in memory ``apart`` from that of the arguments."""
        wanted = tuple(outputs)
        part = self._parts.get(wanted)
        if part is None:
            states = [self.state(k) for k in wanted]
            needs = dict.fromkeys(n for state in states if isinstance(state, Summed) for n in state.needs)
            part = self._parts[wanted] = _Part(self._graph, self._inputs, list(needs), self._inductor)
        computed = part.run([arguments[k] for k in self._tensors])
        return Computed(_apart(computed, arguments) if apart else computed)


def _traced_again(graph: fx.GraphModule, arguments: Sequence[Any], tensors: Sequence[int]) -> fx.GraphModule:
    """The graph for numbers and strides of this call, in ops of few kinds.

    The compiler may have given saved tensors other strides than it traced the graph with, so that views need not exist.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes long to import

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

    trace = make_fx(run, simpler_ops(), tracing_mode="fake", _allow_non_fake_inputs=True)
    with torch.no_grad():
        return trace(*[arguments[k] for k in tensors])


class _Part:
    """The nodes that some outputs need, and nothing else."""

    def __init__(
        self, graph: fx.GraphModule, inputs: Sequence[fx.Node], needs: Sequence[fx.Node], inductor: bool
    ) -> None:
        self._needs = frozenset(needs)
        self._inputs, self._wanted = inputs, [n for n in needs if n.op != "placeholder"]
        self._graph = _pruned(graph, self._wanted)
        self._run: Callable[..., Sequence[Tensor]] = self._graph
        self._runs, self._inductor = 0, inductor

    def run(self, tensors: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
        self._runs += 1
        if self._inductor and self._runs == _SHORT + 1:  # so many calls of one shape, that more are to be expected
            self._run = compiled_by_inductor(self._graph, tensors)
        with torch.no_grad():
            results = self._run(*tensors) if self._wanted else ()
        values = {n: t for n, t in zip(self._inputs, tensors, strict=True) if n in self._needs}
        return {**values, **dict(zip(self._wanted, results, strict=True))}


def _apart(values: Mapping[fx.Node, Tensor], arguments: Sequence[Any]) -> dict[fx.Node, Tensor]:
    """The same, with copies of what lies in the memory of arguments."""
    taken = {a.untyped_storage().data_ptr() for a in arguments if isinstance(a, Tensor)}
    return {n: t.clone() if t.untyped_storage().data_ptr() in taken else t for n, t in values.items()}


def _pruned(graph: fx.GraphModule, wanted: Sequence[fx.Node]) -> fx.GraphModule:
    """The same graph, but it returns these nodes and computes nothing else."""
    pruned, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        if node.op != "output":
            copies[node] = pruned.node_copy(node, copies.__getitem__)
    pruned.output(tuple(copies[n] for n in wanted))
    pruned.eliminate_dead_code()
    for node in pruned.nodes:
        if str(node.target) == "aten.convolution_backward.default":  # computes only what it is told to
            read = {user.args[1] for user in node.users}
            mask = [bool(on) and k in read for k, on in enumerate(node.args[-1])]
            node.args = (*node.args[:-1], mask)
    return fx.GraphModule(graph, pruned)
