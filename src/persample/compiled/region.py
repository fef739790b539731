"""A graph that Dynamo has captured of the losses, and what is done when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..graph.read.saved import version
from .build import Answer, Build
from .trace import Problem

_under_way: ContextVar[Call | None] = ContextVar("compiled call", default=None)


class Interrupted(Exception):
    """Raised by a region that has no answer, or a doubtful one, before the losses' function does anything outside."""


@dataclass(slots=True)
class Call:
    """One call of a compiled step: the losses' function runs, and its region leaves here what it has done."""

    regions: list[Region] = field(default_factory=list)
    inputs: Sequence[Any] = ()  # of the region
    before: State | None = None  # what the region may have changed
    answer: Answer | None = None  # if it was compiled

    def run(self, fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function that Dynamo watches over."""
        token = _under_way.set(self)
        try:
            return fn(*args, **kwargs)
        finally:
            _under_way.reset(token)

    def undo(self) -> None:
        """Bring back what the region has changed, and random generators."""
        if self.before is not None:
            self.before.restore()


class Region:
    """Called by the code that Dynamo makes of the losses' function, in place of the ops that it has captured."""

    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph
        self.builds: dict[tuple[Any, ...], Build] = {}  # by the sizes that are not fixed in the graph
        self.changed: list[int] = []  # tensors among the inputs that the losses' function changes in place
        self.draws = True  # random numbers

    def serving(self, problem: Problem, inputs: Sequence[Any]) -> Build | None:
        """A build for other sizes or other parameters that is right for these, too."""
        sizes = self.sizes(inputs)
        for known, made in self.builds.items():
            if made.problem.is_like(problem) and (known == sizes or made.serves(inputs)):
                return replace(made, problem=problem)
        return None

    def sizes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Those that the graph leaves open."""
        return tuple([x for x in inputs if not isinstance(x, Tensor)])

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        call = _under_way.get()
        if call is None:  # Dynamo runs it for reasons of its own
            return self.plainly(inputs)
        call.regions.append(self)
        call.inputs = inputs
        build = self.builds.get(self.sizes(inputs)) if len(call.regions) == 1 else None
        if build is None or not build.is_checked or not build.problem.is_of(inputs):
            raise Interrupted
        tensors = tensors_in(inputs) if self.changed else []
        call.before = State.of([tensors[i] for i in self.changed], draws=self.draws)
        call.answer = build.answer(inputs)
        if call.answer.doubt is not None:
            raise Interrupted
        return call.answer.outputs

    def plainly(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the graph as it is."""
        with torch.enable_grad():  # there may be hooks
            outputs: Sequence[Any] = self.graph(*inputs)
        return outputs


@dataclass(frozen=True, slots=True)
class State:
    """Tensors that may be changed in place, with their numbers, and where random generators stand."""

    tensors: Sequence[Tensor]
    numbers: Sequence[Tensor]
    versions: Sequence[int]
    generators: Sequence[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], *, draws: bool = True) -> State:
        """As they are now."""
        numbers = [t.detach().clone() for t in tensors]
        return cls(tensors, numbers, [version(t) for t in tensors], _generators() if draws else ())

    def changed(self) -> list[int]:
        """Which of the tensors have been changed since."""
        return [i for i, (t, v) in enumerate(zip(self.tensors, self.versions, strict=True)) if version(t) != v]

    def restore(self) -> None:
        """Bring all back to what they were."""
        with torch.no_grad():
            for i in self.changed():
                self.tensors[i].copy_(self.numbers[i])
        if self.generators:
            torch.set_rng_state(self.generators[0])
            for device, state in enumerate(self.generators[1:]):
                torch.cuda.set_rng_state(state, device)


def tensors_in(inputs: Sequence[Any]) -> list[Tensor]:
    """The tensors among the inputs of a region; others are sizes."""
    return [t for t in inputs if isinstance(t, Tensor)]


def _generators() -> list[Tensor]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpus]
