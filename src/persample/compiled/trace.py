"""The engine run on tensors without numbers, and all that it does to them written down as a graph.

There is no second table of rules for compiled steps: the graph is what the rules, factors and reductions of this
package do. Planning looks at shapes alone; where data would decide, it says so, and nothing is compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ..kernels.certificates import Certificate, choosing_for, traced
from ..params import named
from ..reductions import Reduction
from ..reductions.answers import Rebuild, plain_parts, take_apart
from ..reductions.groups import by_names
from ..reductions.sums import Stack
from ..refusal import NotCompiled
from ..trees import leaves, tree_map
from ..verbs import reduce
from .compilers import traced_graph
from .watched import Watched, kinds_of

_MOST_CONSTANTS = 2**26  # bytes of numbers that a graph may hold


@dataclass(frozen=True)
class Problem:
    """What is to be traced: the graph of the losses, and what to compute of their gradients."""

    losses_graph: GraphModule
    losses_at: int  # among the outputs of that graph
    names: Sequence[str | None]  # of the parameters among its inputs
    watched: Watched  # the parameters
    as_sequence: bool  # whether results come as tuples
    reductions: Sequence[Reduction]
    max_memory: int | None
    independent: bool
    kinds: Sequence[Any]  # what the reductions are, but for numbers in their tensors
    usual: int  # number of samples, by which ways are chosen for all batch sizes

    @property
    def params(self) -> Mapping[str, Tensor]:
        """All that were asked for, reached or not."""
        return self.watched.named

    @cached_property
    def unreached(self) -> dict[str, Tensor]:
        """Parameters that the losses do not depend on."""
        return {name: p for name, p in self.params.items() if name not in self.names}

    @cached_property
    def tensors_at(self) -> list[int]:
        """Where there are tensors among the inputs of the graph of the losses."""
        placeholders = [node for node in self.losses_graph.graph.nodes if node.op == "placeholder"]
        return [i for i, node in enumerate(placeholders) if isinstance(node.meta["example_value"], Tensor)]

    def tensors(self, inputs: Sequence[Any]) -> list[Tensor]:
        """All tensors that the traced graph is given, from the inputs of the graph of the losses."""
        return [*[inputs[i] for i in self.tensors_at], *self.unreached.values(), *tensors_of(self.reductions)]

    @cached_property
    def reached(self) -> list[tuple[int, Tensor]]:
        """The parameters among the inputs of the graph of the losses."""
        return [(i, self.params[name]) for i, name in enumerate(self.names) if name is not None]

    def is_of(self, inputs: Sequence[Any]) -> bool:
        """Are the parameters still these, the reductions like those of then, and all inputs without a past?

        Dynamo watches over all that the losses depend on, but not over that.
        """
        return (
            all(inputs[i] is p for i, p in self.reached)
            and not computed_before(inputs)
            and self.watched.are_the_same()
            and kinds_of(self.reductions) == self.kinds
        )

    def is_like(self, other: Problem) -> bool:
        """Is the graph of one that of the other, whatever the parameters are?"""
        shapes, theirs = ([(n, p.shape, p.dtype, p.device) for n, p in q.params.items()] for q in (self, other))
        return shapes == theirs and (self.losses_graph, self.losses_at, list(self.names), self.kinds) == (
            other.losses_graph, other.losses_at, list(other.names), other.kinds
        )  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """A graph from tensors to outputs of the losses' graph, tensors of results, and one bool for every doubt."""

    graph: GraphModule
    outputs: int  # how many of the first tensors are outputs of the losses' graph
    rebuild: Rebuild  # the results, of the tensors after these
    doubts: Sequence[str]  # what the last tensor says, one by one
    plain: Sequence[Any]  # what there is in results beside tensors


def trace(problem: Problem, inputs: Sequence[Any]) -> Traced:
    """The graph for inputs of these shapes; `NotCompiled` with the reason if there is none."""
    found: dict[str, Any] = {}

    def step(*given: Tensor) -> list[Tensor]:
        outputs, results, certificates = _run(problem, inputs, list(given))
        tensors, found["rebuild"] = take_apart(results)
        found["plain"] = plain_parts(results)
        found["outputs"], found["doubts"] = len(outputs), [c.doubt for c in certificates]
        holds = [torch.stack([c.holds.all() for c in certificates])] if certificates else []
        return [t.detach() for t in (*outputs, *tensors, *holds)]

    torch.clear_autocast_cache()  # weights that were cast for real, and those that will not have been
    try:
        with warnings.catch_warnings(action="ignore"):
            graph = traced_graph(step, [t.detach() for t in problem.tensors(inputs)])
    except NotCompiled:
        raise
    except Exception as error:  # the eager engine has answered already: whatever this is, it is about tracing
        raise NotCompiled(_reason(error)) from error
    finally:
        torch.clear_autocast_cache()
    _refuse_large_constants(graph)
    return Traced(graph, found["outputs"], found["rebuild"], found["doubts"], found["plain"])


def _run(
    problem: Problem, inputs: Sequence[Any], given: list[Tensor]
) -> tuple[Sequence[Tensor], tuple[Any, ...], list[Certificate]]:
    """Losses and reductions, of tensors in place of the inputs, of unreached parameters and of the reductions'."""
    params: dict[str, Tensor] = {}
    arguments = []
    for t, name in zip(inputs, problem.names, strict=True):
        if isinstance(t, Tensor):
            given[0] = given[0].detach().requires_grad_(t.requires_grad)
            if name is not None:
                given[0] = params.setdefault(name, given[0])  # Dynamo may give one parameter in several places
            arguments.append(given.pop(0))
        else:
            arguments.append(t)
    for name in problem.unreached:
        params[name] = given.pop(0).detach().requires_grad_()
    params = {name: params[name] for name in problem.params}  # in their order
    asked = with_tensors(problem.reductions, given, problem.params)
    with torch.enable_grad(), choosing_for(problem.usual), traced() as certificates:
        outputs = problem.losses_graph(*arguments)
        results = reduce(
            outputs[problem.losses_at],
            list(params.values()) if problem.as_sequence else params,
            *asked,
            independent=problem.independent,
            max_memory=problem.max_memory,
        )
    return outputs, results, certificates


def tensors_of(reductions: Sequence[Reduction]) -> list[Tensor]:
    """What reductions were made with: weights, directions."""
    return [t.detach() for r in reductions for t in leaves(_settings(r)) if isinstance(t, Tensor)]


def computed_before(inputs: Sequence[Any]) -> bool:
    """Is an input the result of other computations, through which gradients flow?"""
    return any(isinstance(t, Tensor) and t.grad_fn is not None for t in inputs)


def with_tensors(
    reductions: Sequence[Reduction], tensors: Sequence[Tensor], params: Mapping[str, Tensor]
) -> list[Reduction]:
    """The same reductions with other tensors, for other tensors in place of the parameters."""
    rest, made = iter(tensors), []
    for reduction in reductions:
        new = copy(reduction)
        vars(new).update(tree_map(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, _settings(reduction)))
        if getattr(reduction, "per", None) is not None:
            new.per = by_names(reduction.per, params)  # type: ignore[attr-defined]
        made.append(new)
    return made


def _settings(reduction: Reduction) -> dict[str, Any]:
    """The attributes of a reduction that may hold tensors; groups of parameters are no such thing."""
    settings = {key: value for key, value in vars(reduction).items() if key != "per"}
    return {key: named(value) if isinstance(value, nn.Module) else value for key, value in settings.items()}


def check_compilable(reductions: Sequence[Reduction]) -> None:
    """Refuse buffers for results, which a graph has its own of."""
    for reduction in reductions:
        if isinstance(reduction, Stack) and reduction.out is not None:
            raise ValueError("a compiled step writes results into new tensors: leave out=... out of ps.Stack")


def _refuse_large_constants(graph: GraphModule) -> None:
    held = sum(t.nbytes for t in (*graph.buffers(), *graph.parameters()))
    held += sum(t.nbytes for t in vars(graph).values() if isinstance(t, Tensor))
    if held > _MOST_CONSTANTS:
        raise NotCompiled(f"the graph would have to hold {held / 2**20:.0f} MiB of numbers, as of a random projection")


def _reason(error: Exception) -> str:
    if isinstance(error, TypeError) and "SymInt" in str(error):
        return "numbers decide the sizes of tensors"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
