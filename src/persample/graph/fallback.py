"""The exact slow way: one sample's cotangent at a time through one node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .invoke import call, is_opaque, sum_to
from .layout import Layout, labels
from .saved import in_checkpoint
from .site import Site

# Node types whose backward was seen to give the same numbers under vmap as in a loop (tests/graph/test_fallback.py).
VMAP = frozenset(
    [
        "Add",
        "Sub",
        "Rsub",
        "Mul",
        "Div",
        "Neg",
        "Pow",
        "Exp",
        "Log",
        "Sqrt",
        "Rsqrt",
        "Reciprocal",
        "Tanh",
        "Sigmoid",
        "Relu",
        "Gelu",
        "Silu",
        "Softplus",
        "LeakyRelu",
        "Elu",
        "Sin",
        "Cos",
        "Abs",
        "Clamp",
        "Where",
        "Sum",
        "Mean",
        "Var",
        "Std",
        "LinalgVectorNorm",
        "Norm",
        "Softmax",
        "LogSoftmax",
        "Cumsum",
        "Mm",
        "Addmm",
        "Bmm",
        "Baddbmm",
        "Mv",
        "Dot",
        "T",
        "Transpose",
        "Permute",
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Expand",
        "Unsqueeze",
        "Squeeze",
        "Slice",
        "Select",
        "Cat",
        "Stack",
        "Clone",
        "ToCopy",
        "IndexSelect",
        "Gather",
        "NativeLayerNorm",
        "Tril",
        "Triu",
        "Diagonal",
        "Repeat",
        "Flip",
        "Roll",
        "Split",
        "SplitWithSizes",
        "Unbind",
        "MaskedFill",
    ]
)


def one_hot_cotangents(g: Tensor, layout: Layout) -> Iterable[Tensor]:
    """For every sample, ``g`` with all other samples' elements set to zero."""
    mark = labels(layout, tuple(g.shape), g.device)
    return (torch.where(mark == i, g, torch.zeros((), dtype=g.dtype, device=g.device)) for i in range(layout.batch))


def push_masked(
    site: Site,
    cotangents: Sequence[Tensor | None],
    layouts: Sequence[Layout | None],
    batch: int,
    wanted: Sequence[int],
) -> dict[int, Tensor]:
    """(B, *target) for every wanted output of a separable node."""
    lanes = [
        iter(one_hot_cotangents(g, lay)) if g is not None and lay is not None else None
        for g, lay in zip(cotangents, layouts, strict=True)
    ]
    rows = ([None if lane is None else next(lane) for lane in lanes] for _ in range(batch))
    return _loop(site, rows, batch, wanted)


def push_stacked(site: Site, stacks: Sequence[Tensor | None], batch: int, wanted: Sequence[int]) -> dict[int, Tensor]:
    """(B, *target) for every wanted output of a node whose cotangents are (B, *shape)."""
    if site.name in VMAP and not is_opaque(site.node) and not in_checkpoint(site.node):
        return _vmapped(site, stacks, wanted)
    rows = ([None if s is None else s[i] for s in stacks] for i in range(batch))
    return _loop(site, rows, batch, wanted)


def _vmapped(site: Site, stacks: Sequence[Tensor | None], wanted: Sequence[int]) -> dict[int, Tensor]:
    live = [s for s in stacks if s is not None]

    def one(*given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        outputs = call(site.node, [None if s is None else next(rest) for s in stacks], site.edges)
        return tuple(_finish(site, k, outputs[k], given[0]) for k in wanted)

    return dict(zip(wanted, torch.vmap(one)(*live), strict=True))


def _loop(site: Site, rows: Iterable[Sequence[Tensor | None]], batch: int, wanted: Sequence[int]) -> dict[int, Tensor]:
    results: dict[int, Tensor] = {}
    for i, row in enumerate(rows):
        outputs = call(site.node, row, site.edges)
        for k in wanted:
            value = _finish(site, k, outputs[k], next(g for g in row if g is not None))
            if k not in results:
                results[k] = value.new_zeros(batch, *value.shape)
            results[k][i] = value
    return results


def _finish(site: Site, k: int, value: Tensor | None, like: Tensor) -> Tensor:
    meta = site.metadata(k)
    if value is None:
        return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
    return sum_to(value, site.target(k), meta.dtype)
