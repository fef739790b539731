"""The audit: one question after the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import PerformanceWarning
from .._factories import in_words
from ..explain import Explanation, explain
from ..graph.read.compiled import break_graph
from ..numberless import has_numbers
from ..params import named
from ..testing import Report as Comparison
from ..testing import check
from .costs import Cost, measure
from .errors import AuditError
from .estimate import Estimate, estimate
from .independence import Seen, by_graph, by_running_again
from .memory import peaks
from .problem import Loss, Problem, first_losses
from .report import Parameter, Report
from .spec import load

Progress = Callable[[str], None]
STAGES = (
    "running the model",
    "reading the graph",
    "comparing with the definition",
    "running parts of the batch again",
    "measuring time",
    "measuring memory",
)
_MEMINFO = Path("/proc/meminfo")


@break_graph
def audit(
    model: nn.Module,
    inputs: Any,
    loss: Loss | None = None,
    *,
    targets: Any = None,
    repeats: int = 10,
    seed: int = 0,
    tolerance: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Does persample work on this model: exactly, with samples that keep apart, and at what price?

    >>> import torch
    >>> from persample.audit import audit
    >>> model, x = torch.nn.Linear(3, 2), torch.randn(5, 3)
    >>> report = audit(model, x, lambda output: output.square().sum(1), repeats=1)
    >>> report.verdict
    'exact, and samples are independent'

    Args:
        model: is called as ``model(*inputs)`` for a list or tuple, ``model(**inputs)`` for a mapping, else
            ``model(inputs)``. It, its buffers and ``p.grad`` are afterwards as they were before.
        inputs: a batch of two or more samples.
        loss: gives the losses, of shape (B,): ``loss(output, targets)`` if there are targets, else ``loss(output)``,
            or ``loss(model, inputs)`` if it takes two arguments. Without it the model gives the losses.
        targets: what the loss is given beside the output.
        repeats: rounds of timing; 0 leaves it out.
        seed: of random numbers (dropout), the same for every run of the model.
        tolerance: allowed error relative to the sample's largest gradient; by default what the dtype can hold.
        progress: is told the name of every stage as it begins.

    Returns:
        A `Report`. Memory is not measured: that needs a process of its own, which `audit_spec` starts. For tensors on
        ``meta`` or of a ``FakeTensorMode``, costs are estimated from shapes, and nothing is compared.
    """
    problem = Problem(model, inputs, targets, loss, seed=seed)
    return _audit(problem, type(model).__name__, repeats, tolerance, progress or _silent)


@break_graph
def audit_spec(
    spec: str,
    *,
    batch_size: int | None = None,
    device: str | None = None,
    repeats: int = 10,
    seed: int = 0,
    tolerance: float | None = None,
    memory: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Audit what ``package.module:factory`` or ``file.py:factory`` makes.

    >>> from persample.audit import audit_spec
    >>> audit_spec("persample.audit.models:mlp", batch_size=4, repeats=1, memory=False).ok
    True

    Args:
        spec: names a function that returns (model, inputs), (model, inputs, loss), (model, inputs, targets, loss) or a
            mapping with these names; a file may have these names at its top instead.
        batch_size: is given to the function as ``batch_size``.
        device: where everything is moved to.
        repeats: rounds of timing; 0 leaves it out.
        seed: of random numbers, also those that the function uses.
        tolerance: as for `audit`.
        memory: also measure memory, in a process that makes everything again (Linux, CPU).
        progress: is told the name of every stage as it begins.

    Returns:
        A `Report`.
    """
    tell = progress or _silent
    problem = load(spec, batch_size=batch_size, seed=seed, device=device)
    report = _audit(problem, spec, repeats, tolerance, tell)
    if not memory or not report.costs:
        return report
    tell(STAGES[5])
    return _with_memory(report, problem, spec, batch_size, seed)


def _silent(stage: str) -> None:
    pass


def _audit(problem: Problem, name: str, repeats: int, tolerance: float | None, tell: Progress) -> Report:
    tell(STAGES[0])
    losses, model = first_losses(problem), problem.model
    batch, frozen = len(losses), sum(not p.requires_grad for p in model.parameters())
    if not has_numbers(losses):
        return _audit_shapes(problem, losses, name, repeats > 0, tell)
    stack_bytes = batch * _bytes(p for p in model.parameters() if p.requires_grad)
    _check_room(stack_bytes, batch, losses.device)
    tell(STAGES[1])
    explanation, graph, refusal = _read_graph(losses, model)
    del losses
    comparison: Comparison | None = None
    if refusal is None:
        tell(STAGES[2])
        comparison, refusal = _compare(problem, tolerance)
    tell(STAGES[3])
    rerun, buffers = by_running_again(problem, batch)
    costs: tuple[Cost, ...] = ()
    if refusal is None and repeats > 0:
        tell(STAGES[4])
        costs = measure(problem, repeats)
    return Report(
        name=name,
        how=problem.how,
        batch=batch,
        parameters=_parameters(model, explanation, comparison),
        frozen=frozen,
        refusal=refusal,
        tolerance=tolerance,
        graph=graph,
        rerun=rerun,
        costs=costs,
        activations=None,
        stack_bytes=stack_bytes,
        notes=_notes(comparison, explanation, buffers),
        parameter_bytes=_bytes(model.parameters()),
    )


def _audit_shapes(problem: Problem, losses: Tensor, name: str, costs: bool, tell: Progress) -> Report:
    """What can be said of a model whose tensors have no numbers."""
    batch, parameters = len(losses), list(problem.model.parameters())
    tell(STAGES[1])
    explanation, graph, refusal = _read_graph(losses, problem.model)
    del losses
    estimates: tuple[Estimate, ...] = ()
    held: int | None = None
    if refusal is None and costs:
        tell(STAGES[4])
        estimates, held = estimate(problem)
    return Report(
        name=name,
        how=problem.how,
        batch=batch,
        parameters=_parameters(problem.model, explanation, None),
        frozen=sum(not p.requires_grad for p in parameters),
        refusal=refusal,
        tolerance=None,
        graph=graph,
        rerun=Seen("unknown", (), "there are no numbers that could change"),
        costs=(),
        activations=held,
        stack_bytes=batch * _bytes(p for p in parameters if p.requires_grad),
        notes=(*_notes(None, explanation, ()), *_what_is_unknown(explanation, estimates)),
        estimates=estimates,
        parameter_bytes=_bytes(parameters),
        has_numbers=False,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _what_is_unknown(explanation: Explanation | None, estimates: Iterable[Estimate]) -> list[str]:
    """What data would have shown."""
    undecided = explanation.undecided if explanation is not None else ()
    notes = [
        f"data decide where samples lie in {op}: taken to meet there, which is the slowest case" for op in undecided
    ]
    notes += [f"the cost of {one.name} is unknown: {one.unknown}" for one in estimates if one.unknown]
    return [*notes, "gradients were not compared with the definition, nor time measured: the tensors have no numbers"]


def _check_room(stack_bytes: int, batch: int, device: torch.device) -> None:
    """Refuse a comparison for which memory would run out: gradients are written out twice, in double precision."""
    free = None
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type == "cpu" and _MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    needed = 3 * stack_bytes
    if free is not None and needed > free:
        raise AuditError(
            f"comparing the gradients of {batch} samples with the definition needs about {needed / 2**30:.1f} GB, and "
            f"{free / 2**30:.1f} GB are free: use fewer samples (eight are enough) or a smaller copy of the model"
        )


def _read_graph(losses: Tensor, model: nn.Module) -> tuple[Explanation | None, Seen, str | None]:
    """How every use is handled, whether samples meet, and what persample refuses it for."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)
            explanation = explain(losses, model)
            refused = [row.handling for row in explanation.rows if row.handling.startswith("refused")]
            if not refused:
                return explanation, by_graph(losses, model, explanation.interactions), None
        return explanation, Seen("unknown", (), "the graph was refused"), refused[0].removeprefix("refused: ")
    except Exception as error:  # whatever it is, the report says so
        return None, Seen("unknown", (), "the graph was refused"), in_words(error)


def _compare(problem: Problem, tolerance: float | None) -> tuple[Comparison | None, str | None]:
    try:
        return check(problem.losses, problem.model, rtol=tolerance), None
    except Exception as error:  # whatever it is, the report says so
        return None, in_words(error)


def _parameters(
    model: nn.Module, explanation: Explanation | None, comparison: Comparison | None
) -> tuple[Parameter, ...]:
    handled: dict[str, dict[str, None]] = {}
    for row in explanation.rows if explanation else ():
        how = "refused" if row.handling.startswith("refused") else row.handling
        handled.setdefault(row.parameter, {})[how] = None
    compared = {row.name: row for row in comparison.rows} if comparison is not None else {}
    parameters = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            one = Parameter(name, tuple(p.shape), tuple(handled.get(name, ["refused"])))
            seen = compared.get(name)
            parameters.append(replace(one, error=seen.error, magnitude=seen.magnitude, ok=seen.ok) if seen else one)
    return tuple(parameters)


def _notes(comparison: Comparison | None, explanation: Explanation | None, buffers: tuple[str, ...]) -> tuple[str, ...]:
    notes = list(comparison.warnings) if comparison is not None else []
    unreached = [row.parameter for row in explanation.rows if row.handling.startswith("zeros")] if explanation else []
    if unreached:
        notes.append(f"the losses do not reach {', '.join(unreached)}: their gradients are zeros")
    if buffers:
        notes.append(f"buffers keep statistics of the data, which private training refuses: {', '.join(buffers)}")
    return tuple(notes)


def _with_memory(report: Report, problem: Problem, spec: str, batch_size: int | None, seed: int) -> Report:
    device = next(iter(named(problem.model).values())).device
    if device.type != "cpu":
        return replace(
            report, notes=(*report.notes, f"memory was not measured: it is on the CPU only, not on {device}")
        )
    try:
        bytes_by_step = peaks(spec, batch_size=batch_size, seed=seed)
    except AuditError as error:
        return replace(report, notes=(*report.notes, str(error)))
    costs = tuple(replace(cost, bytes_above=bytes_by_step.get(cost.name)) for cost in report.costs)
    return replace(report, costs=costs, activations=bytes_by_step["forward"])
