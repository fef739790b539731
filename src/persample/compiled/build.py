"""One build: the graph of a step for inputs of given shapes, compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..graph.read.compiled import as_written
from ..kernels.pages import POOL
from ..refusal import NotCompiled
from .batches import OpenBatch, common_graph
from .compilers import OpenInputs, Runnable, compiled_by, open_sizes
from .trace import Problem, Traced, trace

Backend = str | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a compiled step has returned."""

    outputs: Sequence[Tensor]  # those of the losses' graph
    results: tuple[Any, ...]
    doubt: str | None  # why the results are not to be used


@dataclass(frozen=True)
class Opened:
    """The sizes that a build for an open batch size is right for."""

    batch: OpenBatch
    inputs: OpenInputs

    def serves(self, inputs: Sequence[Any]) -> bool:
        """Are all sizes but that of the batch as they were, and is that one right for the code?"""
        values, size = open_sizes(self.batch.dims, inputs), self.batch.size
        return {**self.batch.values, size: values[size]} == values and self.inputs.serve(values[size])


@dataclass(frozen=True)
class Build:
    """A compiled step: from the inputs of the losses' graph to its outputs and to results."""

    problem: Problem
    traced: Traced
    run: Runnable
    seconds: float  # that tracing and compiling took
    opened: Opened | None = None  # if it is for more than one batch size
    closed: str | None = None  # why it is for one alone, though the losses' graph is not
    is_checked: bool = False  # whether it has given the eager engine's answer to inputs of a size

    def answer(self, inputs: Sequence[Any]) -> Answer:
        """Run the step."""
        POOL.begin_call()
        traced = self.traced
        given = self.problem.tensors(inputs)
        with as_written(given[:1]):
            tensors = self.run(*given)
        end = len(tensors) - bool(traced.doubts)
        doubt = _doubt(tensors[-1], traced.doubts) if traced.doubts else None
        return Answer(tensors[: traced.outputs], traced.rebuild(iter(tensors[traced.outputs : end])), doubt)

    def serves(self, inputs: Sequence[Any]) -> bool:
        """Is this build, made for other sizes, right for inputs of these?"""
        return self.opened is not None and self.opened.serves(inputs)

    @cached_property
    def draws(self) -> bool:
        """Are there random ops in the graph?"""
        targets = [node.target for node in self.traced.graph.graph.nodes]
        return any(torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) for target in targets)

    @cached_property
    def narrowest(self) -> torch.dtype:
        """The dtype of the fewest digits that anything is computed in."""
        values = [node.meta.get("val") for node in self.traced.graph.graph.nodes]
        found = {t.dtype for t in values if isinstance(t, Tensor) and t.is_floating_point()}
        return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _doubt(holds: Tensor, doubts: Sequence[str]) -> str | None:
    if bool(holds.all()):
        return None
    return next(doubt for doubt, ok in zip(doubts, holds.tolist(), strict=True) if not ok)


def build(problem: Problem, inputs: Sequence[Any], backend: Backend) -> Build:
    """Trace and compile, for all batch sizes if that can be done; `NotCompiled` with the reason if neither can."""
    start = time.perf_counter()
    traced = trace(problem, inputs)
    batch = OpenBatch.of(problem.losses_graph, problem.losses_at, inputs)
    run, opened, closed = None, None, None
    if batch is not None:
        try:
            run, opened = _for_all_sizes(problem, traced, batch, inputs, backend)
        except NotCompiled as reason:
            closed = str(reason)
    run = run or _compiled(backend, traced.graph, [t.detach() for t in problem.tensors(inputs)])
    return Build(problem, traced, run, time.perf_counter() - start, opened, closed)


def _for_all_sizes(
    problem: Problem, traced: Traced, batch: OpenBatch, inputs: Sequence[Any], backend: Backend
) -> tuple[Runnable, Opened]:
    """Compile one graph for all batch sizes."""
    if not batch.is_linear:
        raise NotCompiled("losses_fn computes something of the batch size that does not grow linearly with it")
    sizes = [batch.now, *batch.others()]
    each = [traced, *[trace(problem, batch.inputs_at(size, inputs)) for size in sizes[1:]]]
    if any(other.plain != traced.plain for other in each):
        raise NotCompiled("a result has a number that depends on the batch size")
    graphs = [one.graph for one in each]
    (at, dim), places = batch.place, problem.tensors_at
    graph = common_graph(graphs, sizes, places.index(at), dim)
    given = OpenInputs(problem.tensors(inputs), lambda i, d: i < len(places) and batch.is_open(places[i], d))
    run = _compiled(backend, graph, given.tensors)
    if not all(map(given.serve, sizes)):
        raise NotCompiled("the backend has fixed the batch size")
    return run, Opened(batch, given)


def _compiled(backend: Backend, graph: GraphModule, inputs: Sequence[Any]) -> Runnable:
    """`compiled_by`, with errors of the backend as reasons not to compile."""
    try:
        return compiled_by(backend, graph, inputs)
    except Exception as error:  # a backend may raise anything
        lines = str(error).strip().splitlines() or [""]
        raise NotCompiled(f"the backend {backend!r} failed with {type(error).__name__}: {lines[0]}") from error
