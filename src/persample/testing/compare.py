"""Comparing persample with the definition."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._errors import PerformanceWarning
from .._table import render
from ..checks import check_losses, explained
from ..graph.read.compiled import break_graph
from ..graph.read.roots import Roots
from ..graph.read.saved import metadata
from ..kernels.devices import has_float64
from ..numberless import has_numbers
from ..params import Params, named
from ..verbs import grad

__all__ = ["Report", "Row", "check", "definition"]


@dataclass(frozen=True, slots=True)
class Row:
    """How one parameter compares."""

    name: str
    shape: tuple[int, ...]
    error: float  # largest difference, relative to the largest gradient of the same sample
    magnitude: float  # the largest gradient of any sample
    ok: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `check`: truthy when every parameter agrees; prints as a table."""

    rows: tuple[Row, ...]
    batch: int
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Does every parameter agree with the definition?"""
        return all(row.ok for row in self.rows)

    @property
    def max_error(self) -> float:
        """The largest relative error of any parameter."""
        return max((row.error for row in self.rows), default=0.0)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [
            (
                row.name,
                str(row.shape),
                f"{row.magnitude:.3g}",
                f"{row.error:.2e}",
                "ok" if row.ok else "WRONG",
            )
            for row in self.rows
        ]
        verdict = "all agree" if self.ok else f"{sum(not row.ok for row in self.rows)} WRONG"
        table = render(("parameter", "shape", "largest gradient", "relative error", ""), lines)
        notes = "".join(f"\nnote: {text}" for text in self.warnings)
        return f"{table}\n{len(self.rows)} parameters, {self.batch} samples: {verdict}{notes}"

    def raise_if_wrong(self) -> None:
        """Raise an AssertionError that shows the table if a parameter disagrees."""
        if not self.ok:
            raise AssertionError(f"per-sample gradients differ from the definition\n{self}")


@break_graph
def definition(losses: Tensor, params: Params) -> dict[str, Tensor]:
    """Per-sample gradients by one ordinary backward per loss: slow, and right by definition; keeps the graph.

    Losses of shape (B, K…) give gradients (B, K…, *shape), as ``persample.grad`` does.
    """
    check_losses(losses, several=True)
    tensors = named(params)
    flat = losses.reshape(-1)
    stacks = {name: torch.zeros((len(flat), *p.shape), dtype=p.dtype, device=p.device) for name, p in tensors.items()}
    for i, rows in enumerate(one_by_one(flat, list(tensors.values())) if tensors else ()):
        for stack, row in zip(stacks.values(), rows, strict=True):
            if row is not None:
                stack[i] = row.to_dense() if row.layout != torch.strided else row
    return {name: stack.view(*losses.shape, *stack.shape[1:]) for name, stack in stacks.items()}


def one_by_one(losses: Tensor, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor | None]]:
    """The gradients of ``tensors`` by one ordinary backward for each of ``losses`` (B,), which keeps the graph."""
    leaves = _leaves(losses) if hides_ops(losses) else None
    for loss in losses.unbind():
        with explained(losses):
            rows: Sequence[Tensor | None]
            if leaves is None:
                rows = torch.autograd.grad(loss, list(tensors), retain_graph=True, allow_unused=True)
            else:
                rows = by_backward(loss, tensors, leaves, retain_graph=True)
        yield rows


def hides_ops(losses: Tensor) -> bool:
    """Does the graph hold reentrant checkpoints, of which ``torch.autograd.grad`` knows nothing?"""
    roots = Roots.of_losses(losses)
    return bool(losses.grad_fn is not None and roots.read() and roots.regions.opened)


def _leaves(losses: Tensor) -> list[Tensor]:
    return list(Roots.of_losses(losses).read().leaves.values())


def by_backward(
    loss: Tensor, tensors: Sequence[Tensor], leaves: Sequence[Tensor], *, retain_graph: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of ``tensors`` by ``loss.backward()``; those of ``leaves`` are as before afterwards."""
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        loss.backward(retain_graph=retain_graph)
        reached = {id(leaf) for leaf in leaves}
        return tuple([t.grad if id(t) in reached else None for t in tensors])
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


@break_graph
def check(
    losses_fn: Callable[[], Tensor], params: Params, *, rtol: float | None = None, atol: float | None = None
) -> Report:
    """Compare ``persample.grad`` with one ordinary backward per sample, parameter by parameter.

    >>> import torch
    >>> from persample.testing import check
    >>> model, x = torch.nn.Linear(3, 2).double(), torch.randn(5, 3).double()
    >>> report = check(lambda: model(x).square().sum(1), model)
    >>> report.ok
    True

    Args:
        losses_fn: computes the losses, shape (B,) or (B, K…), afresh at every call, with the same result (no active
            dropout). Of several losses per sample, each is compared as a sample is.
        params: as for ``persample.grad``.
        rtol: allowed difference relative to the sample's largest gradient of the parameter; by default what its dtype
            can hold, or half precision if the losses were computed in it, as under ``torch.autocast``.
        atol: differences up to this size are allowed whatever the gradients are; by default ten units in the last place
            of the largest gradient of all.

    Returns:
        A report with one row per parameter. ``print(report)`` shows a table, ``report.ok`` is the verdict, and
        ``report.raise_if_wrong()`` is for tests. Warnings about slow paths are listed in ``report.warnings``.
    """
    first, second = losses_fn(), losses_fn()
    check_losses(first, several=True)
    if not has_numbers(first):
        raise ValueError(
            "losses on meta or of a FakeTensorMode have no numbers to compare: ps.explain(losses, params) tells what "
            "follows from shapes alone"
        )
    if not torch.equal(first.detach(), second.detach()) and not bool(first.isnan().any()):
        raise ValueError(
            "losses_fn gave two different results: make it repeatable (model.eval(), or the same seed at every call)"
        )
    want = definition(first, params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerformanceWarning)
        result = grad(second, params)
    got = result if isinstance(result, dict) else {str(i): g for i, g in enumerate(result)}
    notes = tuple(str(w.message) for w in caught if issubclass(w.category, PerformanceWarning))
    largest = max((float(w.abs().nan_to_num(posinf=0).max()) for w in want.values() if w.numel()), default=0.0)
    coarse = _halves(first)
    got, want = ({name: _of_each_loss(g, first) for name, g in stacks.items()} for stacks in (got, want))
    rows = tuple(_compare(name, got[name], want[name], coarse, largest, rtol, atol) for name in want)
    return Report(rows, len(first), notes)


def _of_each_loss(gradients: Tensor, losses: Tensor) -> Tensor:
    """(B, K…, *shape) -> (B·K…, *shape): gradients with the losses in one dim."""
    if gradients.shape[: losses.ndim] != losses.shape:
        raise AssertionError(
            f"gradients of shape {tuple(gradients.shape)} do not begin with the shape of losses, {tuple(losses.shape)}"
        )
    return gradients.reshape(losses.numel(), *gradients.shape[losses.ndim :])


def _halves(losses: Tensor) -> set[torch.dtype]:
    """The half precisions among the cotangents of a graph."""
    nodes = Roots.of_losses(losses).read().nodes
    return {m.dtype for node in nodes for m in metadata(node)} & {torch.float16, torch.bfloat16}


def _compare(
    name: str,
    got: Tensor,
    want: Tensor,
    coarse: set[torch.dtype],
    largest: float,
    rtol: float | None,
    atol: float | None,
) -> Row:
    """One parameter's row: every sample against its own largest gradient; NaN on one side only is an infinite error."""
    dtypes = {want.dtype, *coarse}
    allowed = max(map(tolerance_of, dtypes)) if rtol is None else rtol
    floor = 10 * max(torch.finfo(dtype).eps for dtype in dtypes) * largest if atol is None else atol
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = (_where_float64_is(t).to(wide).reshape(len(want), -1 if want.numel() else 0) for t in (got, want))
    alike = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).abs().masked_fill(alike, 0.0).nan_to_num(nan=float("inf"))
    if not difference.numel():
        return Row(name, tuple(want.shape[1:]), 0.0, 0.0, True)
    error, scale = difference.amax(1), b.abs().masked_fill(~b.isfinite(), 0.0).amax(1)
    relative = error / scale.clamp(min=max(floor, torch.finfo(want.dtype).tiny))
    ok = bool((error <= (allowed * scale).clamp(min=floor)).all())
    return Row(name, tuple(want.shape[1:]), float(relative.max()), float(scale.max()), ok)


def _where_float64_is(t: Tensor) -> Tensor:
    return t if has_float64(t.device) else t.cpu()


def tolerance_of(dtype: torch.dtype) -> float:
    """A few hundred units in the last place, as sums are added in another order; half precisions have few places."""
    return {torch.bfloat16: 0.1, torch.float16: 0.02}.get(dtype, 500 * torch.finfo(dtype).eps)
