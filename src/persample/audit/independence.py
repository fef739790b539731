"""Do samples interact? By the graph, and by running parts of the batch again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .._errors import InteractionError
from ..graph.ops.custom import is_vouched_for
from ..graph.read.nodes import children, op_name
from ..rerun import CallRecorder, RecordedCall, compare_with_fewer_samples, rounding_tolerance
from ..shortcuts import norms
from ..traverse import ordered
from .problem import Problem
from .words import number

Answer = Literal["independent", "interacting", "unknown"]


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer to whether samples interact: where, or why it is not known."""

    answer: Answer
    where: tuple[str, ...] = ()
    reason: str = ""


def by_graph(losses: Tensor, model: nn.Module, ops: tuple[str, ...]) -> Seen:
    """What the graph shows; ``ops`` are those in which samples are known to meet."""
    if ops:
        return Seen("interacting", ops, f"one sample's gradient reaches another in {', '.join(ops)}")
    try:
        norms(losses, model, independent=True)
    except InteractionError as error:
        reason = str(error).removesuffix(", or drop independent=True")
        return Seen("interacting" if error.ops else "unknown", error.ops, reason)
    stated = sorted(
        {
            op_name(node)
            for node in ordered([losses.grad_fn] if losses.grad_fn else [], children)
            if is_vouched_for(node)
        }
    )
    said = f"; of {', '.join(stated)}, somebody has said so" if stated else ""
    return Seen("independent", (), f"every node keeps samples apart{said}")


def by_running_again(problem: Problem, batch: int) -> tuple[Seen, tuple[str, ...]]:
    """What the losses of the same samples in smaller batches show; and buffers in which the data leave a trace."""
    whole = RecordedCall("", problem, (problem.inputs, problem.targets), {})
    comparison = compare_with_fewer_samples(whole, batch)
    if comparison is None:
        return Seen("unknown", (), f"{problem.how} could not be run on a part of the {batch} samples"), ()
    buffers = tuple(name.removeprefix("model.") for name in comparison.buffers)
    allowed, change = (
        rounding_tolerance(problem.model),
        f"losses change by {number(comparison.difference)} of the largest",
    )
    if comparison.difference <= allowed:
        return Seen("independent", (), f"{change}, {allowed:.0e} is allowed for rounding"), buffers
    where = _innermost(problem, batch, allowed)
    return Seen("interacting", where, f"{change}, because of {', '.join(where)}"), buffers


def _innermost(problem: Problem, batch: int, allowed: float) -> tuple[str, ...]:
    """The modules whose outputs depend on the other samples, and of which no part does."""
    interacting: dict[str, str] = {}
    for call in _calls_of_modules(problem):
        comparison = compare_with_fewer_samples(call, batch)
        if comparison is not None and comparison.difference > allowed:
            interacting[call.name] = str(call)
    inner = [text for name, text in interacting.items() if not any(_is_part(other, of=name) for other in interacting)]
    return tuple(inner) or ("the loss",)


def _is_part(name: str, of: str) -> bool:
    return name != of and (not of or name.startswith(f"{of}."))


def _calls_of_modules(problem: Problem) -> list[RecordedCall]:
    """Every call of a module during one forward pass."""
    recorder = CallRecorder(problem.model, inner=True)
    recorder.start()
    try:
        with torch.no_grad():
            problem.losses()
    finally:
        calls = recorder.stop()
    return calls
