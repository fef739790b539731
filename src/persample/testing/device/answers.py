"""Right answers: gradients against the definition, and what is computed from them against gradients written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import shortcuts, verbs
from ...kernels.devices import has_float64
from ...reductions import ClippedSum, Projection
from ..compare import check
from .models import MODELS, Problem, build

__all__ = ["Check", "Wrong", "answers", "clipped", "compare", "flat", "rows_of"]


class Wrong(Exception):
    """An answer that is not the right one."""


class Check(NamedTuple):
    """One line of the report: ``run`` returns a remark, or raises `Wrong`."""

    section: str
    name: str
    run: Callable[[], str]


Make = Callable[[], Problem]
# Relative to the largest number; halves are rounded on the way to the gradients, and once in them.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
PROJECTION = Projection(8, seed=1, kind="gaussian")


def answers(device: torch.device) -> Iterator[Check]:
    """Every model, every reduction, in all precisions; inputs in every layout."""
    wide = torch.float64 if has_float64(device) else torch.float32
    for name in MODELS:
        yield Check(f"gradients, {_word(wide)}", name, partial(_gradients, partial(build, name, device, wide)))
    for autocast in (torch.bfloat16, torch.float16):
        make = partial(build, "gpt block", device, autocast=autocast)
        yield Check(f"autocast, {_word(autocast)}", "gpt block: gradients", partial(_gradients, make))
        yield from _reductions(f"autocast, {_word(autocast)}", "gpt block", make)
    for name in MODELS:
        yield from _reductions("reductions, float32", name, partial(build, name, device))
    if wide == torch.float64:
        yield from _reductions("reductions, float64", "cnn", partial(build, "cnn", device, wide))
    for name, (model, change) in LAYOUTS.items():
        yield Check("layouts", f"{model}, {name}", partial(_layout, partial(build, model, device, wide), change))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gradients(make: Make) -> str:
    """``ps.grad`` against one ordinary backward per sample."""
    problem = make()
    report = check(problem.losses, problem.model)
    if not report.ok:
        worst = max(report.rows, key=lambda row: (not row.ok, row.error))
        raise Wrong(f"{worst.name} differs from the definition by {worst.error:.1e}")
    return f"error {report.max_error:.0e}"


def rows_of(problem: Problem) -> Tensor:
    """(B, n): the gradients written out, in float64 on the CPU."""
    stacks = verbs.grad(problem.losses(), problem.model)
    return torch.cat([g.cpu().double().flatten(1) for g in stacks.values()], 1)


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """All parameters' elements, in float64 on the CPU."""
    return torch.cat([t.detach().cpu().double().flatten() for t in tensors.values()])


def compare(got: Tensor, want: Tensor, dtype: torch.dtype, size: Tensor | None = None) -> str:
    """Raise if a number differs by more than ``dtype`` allows, relative to ``size``, or to the largest of all."""
    got = got.detach().cpu().double()
    if got.shape != want.shape:
        raise Wrong(f"shape {tuple(got.shape)}, not {tuple(want.shape)}")
    scale = want.abs().max() if size is None else size
    error = float(((got - want).abs() / scale.clamp(min=1e-300)).nan_to_num(nan=float("inf")).max())
    if not error <= TOLERANCE[dtype]:
        raise Wrong(f"error {error:.1e}, more than {TOLERANCE[dtype]:.0e}")
    return f"error {error:.0e}"


def _reductions(section: str, model: str, make: Make) -> Iterator[Check]:
    """Every reduction against what the written-out gradients give."""
    for name, run in REDUCTIONS.items():
        yield Check(section, f"{model}: {name}", partial(_reduction, run, make))


@lru_cache(maxsize=1)
def _written_out(make: Make) -> tuple[Problem, Tensor]:
    """A model and its gradients, which are compared with many things."""
    problem = make()
    return problem, rows_of(problem)


def _reduction(run: Callable[[Problem, Tensor], tuple[Any, Tensor]], make: Make) -> str:
    problem, rows = _written_out(make)
    got, want = run(problem, rows)
    return compare(got if isinstance(got, Tensor) else flat(got), want, problem.precision)


def clipped(rows: Tensor, bound: float) -> Tensor:
    """The sum of rows, each scaled down to the bound; rows of zeros add nothing."""
    weights: Tensor = (bound / rows.norm(dim=1)).clamp(max=1)
    return weights @ rows


def _norms(problem: Problem, rows: Tensor) -> tuple[Any, Tensor]:
    return shortcuts.norms(problem.losses(), problem.model), rows.norm(dim=1)


def _clipped_sum(problem: Problem, rows: Tensor) -> tuple[Any, Tensor]:
    bound = float(rows.norm(dim=1).median())
    return shortcuts.clipped_sum(problem.losses(), problem.model, bound), clipped(rows, bound)


def _backward(problem: Problem, rows: Tensor) -> tuple[Any, Tensor]:
    bound = float(rows.norm(dim=1).median())
    verbs.backward(problem.losses(), problem.model, ClippedSum(bound))
    return {n: p.grad for n, p in problem.model.named_parameters() if p.grad is not None}, clipped(rows, bound)


def _second_moment(problem: Problem, rows: Tensor) -> tuple[Any, Tensor]:
    return shortcuts.second_moment(problem.losses(), problem.model), rows.square().mean(0)


def _gram(problem: Problem, rows: Tensor) -> tuple[Any, Tensor]:
    return shortcuts.gram(problem.losses(), problem.model), rows @ rows.t()


def _dot(problem: Problem, rows: Tensor) -> tuple[Any, Tensor]:
    direction = {name: p.detach().sign() for name, p in problem.model.named_parameters()}
    return shortcuts.dot(problem.losses(), problem.model, direction), rows @ flat(direction)


def _project(problem: Problem, rows: Tensor) -> tuple[Any, Tensor]:
    matrix = [
        PROJECTION.rows(name, *block)
        for name, p in problem.model.named_parameters()
        for block in PROJECTION.blocks(p.numel())
    ]
    return shortcuts.project(problem.losses(), problem.model, PROJECTION), rows @ torch.cat(matrix).double()


REDUCTIONS = {
    "norms": _norms,
    "clipped_sum": _clipped_sum,
    "backward(ClippedSum)": _backward,
    "second_moment": _second_moment,
    "gram": _gram,
    "dot": _dot,
    "project": _project,
}


def _channels_last(problem: Problem) -> Problem:
    problem.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return problem.of(problem.x.to(memory_format=torch.channels_last))


LAYOUTS: dict[str, tuple[str, Callable[[Problem], Problem]]] = {
    "channels_last": ("cnn", _channels_last),
    "channels_last inputs": ("depthwise cnn", lambda p: p.of(p.x.to(memory_format=torch.channels_last))),
    "transposed inputs": ("resnet block", lambda p: p.of(p.x.transpose(2, 3))),
    "transposed rows": ("mlp", lambda p: p.of(p.x.t().contiguous().t())),
    "transposed ids": ("gpt block", lambda p: p.of(p.x.t().contiguous().t())),
    "expanded inputs": ("cnn", lambda p: p.of(p.x[:1].expand_as(p.x))),
    "expanded ids": ("lstm", lambda p: p.of(p.x[:1].expand_as(p.x))),
    "every second element": ("mlp", lambda p: p.of(p.x.repeat_interleave(2, 1, output_size=2 * p.x.shape[1])[:, ::2])),
}


def _layout(make: Make, change: Callable[[Problem], Problem]) -> str:
    """Gradients and norms of inputs that lie in memory in another way."""
    problem = change(make())
    remark = _gradients(lambda: problem)
    _reduction(_norms, lambda: problem)
    return remark
