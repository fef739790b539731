"""Do samples interact? By the graph, and by running parts of the batch again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._errors import InteractionError
from ..graph.custom import is_vouched_for
from ..graph.nodes import children, op_name
from ..graph.saved import original_of
from ..graph.traverse import ordered
from ..rerun import Call, compare, tolerance
from ..shortcuts import norms
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
    found = compare(Call("", problem, (problem.inputs, problem.targets), {}), batch)
    if found is None:
        return Seen("unknown", (), f"{problem.how} could not be run on a part of the {batch} samples"), ()
    buffers = tuple(name.removeprefix("model.") for name in found.buffers)
    allowed = tolerance(problem.model)
    if found.difference <= allowed:
        reason = f"losses change by {number(found.difference)} of the largest, {allowed:.0e} is allowed for rounding"
        return Seen("independent", (), reason), buffers
    where = _innermost(problem, batch, allowed)
    reason = f"losses change by {number(found.difference)} of the largest, because of {', '.join(where)}"
    return Seen("interacting", where, reason), buffers


def _innermost(problem: Problem, batch: int, allowed: float) -> tuple[str, ...]:
    """The modules whose outputs depend on the other samples, and of which no part does."""
    found: dict[str, str] = {}
    for call in _calls(problem):
        seen = compare(call, batch)
        if seen is not None and seen.difference > allowed:
            found[call.name] = str(call)
    inner = [text for name, text in found.items() if not any(n != name and _is_part(n, of=name) for n in found)]
    return tuple(inner) or ("the loss",)


def _is_part(name: str, of: str) -> bool:
    return not of or name.startswith(f"{of}.")


def _calls(problem: Problem) -> list[Call]:
    """Every call of a module during one forward pass."""
    calls: list[Call] = []
    with _recording(problem.model, calls), torch.no_grad():
        problem.losses()
    return calls


@contextmanager
def _recording(model: nn.Module, calls: list[Call]) -> Iterator[None]:
    compiled = any(original_of(part) is not None for part in model.modules())
    # Hooks inside of a compiled module would have it compiled again.
    modules = [("", model)] if compiled else list(model.named_modules())

    def recorder(name: str) -> Any:
        return lambda module, args, kwargs: calls.append(Call(name, module, args, kwargs))

    handles = [module.register_forward_pre_hook(recorder(name), with_kwargs=True) for name, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
