"""Hard numbers: gradients that are huge or tiny, that cancel, that are zero or NaN; batches of one and of none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ... import shortcuts, verbs
from ..._errors import NonFiniteError
from .answers import Check, Wrong, clipped, compare, flat, rows_of
from .models import Problem, build

__all__ = ["hard_numbers"]


def hard_numbers(device: torch.device) -> Iterator[Check]:
    """All of this page, in float32."""
    yield from (Check("hard numbers", name, partial(run, device)) for name, run in HARD.items())


def _linear(x: Tensor, device: torch.device) -> tuple[Tensor, torch.nn.Linear]:
    """Losses whose gradients are sums of the rows of every x[i], (B, T, 4), with signs; and the layer."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layer = torch.nn.Linear(4, 3, bias=False).to(device)
    return layer(x.to(device)).sum((1, 2)), layer


def _scales(device: torch.device) -> str:
    """Squares of these gradients overflow, or vanish."""
    scale = torch.tensor([1e-25, 1e-10, 1.0, 1e10, 1e25])
    x = scale.view(-1, 1, 1) * torch.linspace(1, 2, 4).expand(5, 3, 4)
    want = (x.double().sum(1).norm(dim=1) * 3**0.5).float().double()
    remark = compare(shortcuts.norms(*_linear(x, device)), want, torch.float32, want)
    total = shortcuts.clipped_sum(*_linear(x, device), 1.0)
    compare(total.clipping.weights, (1 / want).clamp(max=1), torch.float32, (1 / want).clamp(max=1))
    rows = x.double().sum(1, keepdim=True).expand(-1, 3, -1).flatten(1)
    compare(flat(total), clipped(rows, 1.0), torch.float32)
    return remark


def _cancelling(device: torch.device) -> str:
    """Terms of size 1e4 that leave gradients of size 1: neither norms nor bounds may be lost in their rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        big, rest = 1e4 * torch.randn(6, 20, 4), torch.randn(6, 1, 4)
    x = torch.cat([big, -big, rest], 1)
    want = rest.double().sum(1).norm(dim=1) * 3**0.5
    error = float(((shortcuts.norms(*_linear(x, device)).cpu().double() - want).abs() / want).max())
    sizes = [float(flat(shortcuts.clipped_sum(*_linear(row, device), 0.1)).norm()) for row in x.split(1)]
    if max(sizes) > 0.1 * (1 + 1e-3) or not error < 2e-2:
        raise Wrong(f"error {error:.1e}, and a sample clipped to 0.1 added {max(sizes):.4f}")
    return f"error {error:.0e}"


def _with_nan(device: torch.device) -> Problem:
    problem = build("cnn", device)
    x = problem.x.clone()
    x[2, 0, 0, 0] = float("nan")
    return problem.of(x)


def _nan_is_named(device: torch.device) -> str:
    problem = _with_nan(device)
    try:
        shortcuts.clipped_sum(problem.losses(), problem.model, 0.5)
    except NonFiniteError as error:
        if error.samples != [2]:
            raise Wrong(f"NonFiniteError names samples {error.samples}, not [2]") from error
        return "sample 2"
    raise Wrong("no NonFiniteError was raised")


def _nan_is_dropped(device: torch.device) -> str:
    problem = _with_nan(device)
    total = shortcuts.clipped_sum(problem.losses(), problem.model, 0.5, nonfinite="drop")
    if list(total.clipping.dropped) != [2]:
        raise Wrong(f"dropped {list(total.clipping.dropped)}, not [2]")
    rows = rows_of(build("cnn", device))[[0, 1, 3, 4, 5]]
    return compare(flat(total), clipped(rows, 0.5), torch.float32)


def _nan_stays_in_its_sample(device: torch.device) -> str:
    problem = _with_nan(device)
    norms = shortcuts.norms(problem.losses(), problem.model).cpu().double()
    if not bool(norms[2].isnan()):
        raise Wrong(f"the norm of the sample with NaN is {float(norms[2])}")
    others = [0, 1, 3, 4, 5]
    return compare(norms[others], rows_of(build("cnn", device)).norm(dim=1)[others], torch.float32)


def _zeros(device: torch.device) -> str:
    """Two samples whose gradients are zero, and all of them zero."""
    x = torch.linspace(-1, 1, 48).view(4, 3, 4).clone()
    x[1:3] = 0
    want = x.double().sum(1).norm(dim=1) * 3**0.5
    remark = compare(shortcuts.norms(*_linear(x, device)), want, torch.float32)
    for inputs in (x, torch.zeros_like(x)):
        rows = inputs.double().sum(1, keepdim=True).expand(-1, 3, -1).flatten(1)
        compare(flat(shortcuts.clipped_sum(*_linear(inputs, device), 0.5)), clipped(rows, 0.5), torch.float32)
    return remark


def _batch_of_one(device: torch.device) -> str:
    for model in ("mlp", "cnn", "gpt block"):
        problem = build(model, device, batch=1)
        rows = rows_of(problem)
        (losses,) = problem.losses().unbind()
        losses.backward()
        compare(
            rows[0], flat({n: p.grad for n, p in problem.model.named_parameters() if p.grad is not None}), torch.float32
        )
        remark = compare(shortcuts.norms(problem.losses(), problem.model), rows.norm(dim=1), torch.float32)
    return remark


def _batch_of_none(device: torch.device) -> str:
    for model in ("mlp", "cnn"):
        problem = build(model, device, batch=0)
        shapes = {tuple(g.shape[:1]) for g in verbs.grad(problem.losses(), problem.model).values()}
        norms = shortcuts.norms(problem.losses(), problem.model)
        total = flat(shortcuts.clipped_sum(problem.losses(), problem.model, 0.5))
        if shapes != {(0,)} or norms.shape != (0,) or bool(total.any()):
            raise Wrong(f"{model}: rows {shapes}, norms {tuple(norms.shape)}, sum {float(total.norm())}")
    return "empty rows, sums of zero"


HARD: dict[str, Callable[[torch.device], str]] = {
    "gradients of 1e-25 to 1e25": _scales,
    "terms that cancel": _cancelling,
    "NaN is named": _nan_is_named,
    "NaN is dropped": _nan_is_dropped,
    "NaN stays in its sample": _nan_stays_in_its_sample,
    "gradients of zero": _zeros,
    "a batch of one": _batch_of_one,
    "a batch of none": _batch_of_none,
}
