"""The batched engine: B cotangents at a time through what all samples share.

Factors keep their structure through views and casts; any other node is given stacks of B cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..factors import Dense, Factor, Outer, View
from .fallback import push_stacked
from .layout import Shape
from .site import Site

Lift = Callable[[Site, Factor, Shape], Factor | None]

LIFTS: dict[str, Lift] = {}


def lift(names: str) -> Callable[[Lift], Lift]:
    """Register how factors pass through the node types listed in ``names`` without being stacked."""

    def register(fn: Lift) -> Lift:
        LIFTS.update(dict.fromkeys(names.split(), fn))
        return fn

    return register


@lift("T")
def _transpose(site: Site, factor: Factor, target: Shape) -> Factor | None:
    if len(target) < 2:
        return factor
    return factor.t() if isinstance(factor, Outer) and len(factor.shape) == 2 else _moved(factor, target, (1, 0))


@lift("Transpose")
def _swap(site: Site, factor: Factor, target: Shape) -> Factor | None:
    n = len(target)
    dims = list(range(n))
    a, b = site.number("dim0") % n, site.number("dim1") % n
    dims[a], dims[b] = b, a
    if isinstance(factor, Outer) and {a, b} == {n - 2, n - 1}:
        return factor.t()
    return _moved(factor, target, dims)


@lift("Permute")
def _permute(site: Site, factor: Factor, target: Shape) -> Factor | None:
    dims = site.dims("dims", len(target))
    return _moved(factor, target, [dims.index(d) for d in range(len(dims))])


def _moved(factor: Factor, target: Shape, dims: Sequence[int]) -> Factor:
    order = [0, *[d + 1 for d in dims]]
    return View(factor, target, lambda stack: stack.permute(order))


@lift("View UnsafeView ReshapeAlias Squeeze Unsqueeze")
def _view(site: Site, factor: Factor, target: Shape) -> Factor | None:
    if isinstance(factor, Outer) and factor.shape == (1, *target) and factor.left.ndim == 4:
        return Outer(factor.left.squeeze(1), factor.right.squeeze(1), factor.scale)
    if factor.shape == target:
        return factor
    return View(factor, target, lambda stack: stack.reshape(len(stack), *target))


@lift("Clone Alias Contiguous")
def _same(site: Site, factor: Factor, target: Shape) -> Factor | None:
    return factor


@lift("ToCopy")
def _cast(site: Site, factor: Factor, target: Shape) -> Factor | None:
    dtype = site.metadata(0).dtype
    return View(factor, target, lambda stack: stack.to(dtype), dtype)


@lift("Slice Select")
def _section(site: Site, factor: Factor, target: Shape) -> Factor | None:
    dim = site.number("dim") % len(target)
    if site.name == "Select":
        start = site.number("index") % target[dim]
        return View(factor, target, lambda s: _padded(s.unsqueeze(dim + 1), target, dim, start, 1))
    if site.number("step") != 1:
        return None
    first = site.value("start")
    start = 0 if first is None else site.number("start")
    start = max(start + target[dim], 0) if start < 0 else start
    return View(factor, target, lambda s: _padded(s, target, dim, start, s.shape[dim + 1]))


def _padded(stack: Tensor, target: Shape, dim: int, start: int, size: int) -> Tensor:
    """Set a section of one dim into zeros."""
    whole = stack.new_zeros(len(stack), *target)
    whole.narrow(dim + 1, start, size).copy_(stack)
    return whole


def pull(site: Site, factors: Sequence[Factor | None], batch: int) -> dict[int, Factor]:
    """The factors of a node's inputs from those of its outputs."""
    wanted = [k for k, _ in site.targets()]
    live = [f for f in factors if f is not None]
    if len(live) == 1 and len(site.shapes) == 1 and site.name in LIFTS and wanted == [0]:
        lifted = LIFTS[site.name](site, live[0], site.target(0))
        if lifted is not None:
            return {0: lifted}
    with torch.no_grad():
        stacks = [None if f is None else f.stack() for f in factors]
        return {k: Dense(v) for k, v in push_stacked(site, stacks, batch, wanted).items()}
