"""Running a recorded call again on some of its samples, without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .expanded.trees import leaves, tree_map

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DIMS = (0, 1)  # where samples are looked for
_FEW = 4
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE = 5e-2


@dataclass(frozen=True)
class Call:
    """A call of a module, with the inputs it was given; and its buffers before and after, where they are known."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)

    def __str__(self) -> str:
        kind = type(self.module).__name__
        return f"module {self.name!r} ({kind})" if self.name else f"the model ({kind})"


@dataclass(frozen=True)
class Finding:
    """By how much outputs of the same samples differ, relative to the largest; and buffers that took up data."""

    difference: float
    buffers: tuple[str, ...] = ()


def tolerance(model: nn.Module) -> float:
    """For rounding, which differs with the batch size; coarse if anything is kept in half precision."""
    dtypes = {t.dtype for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()}
    if torch.is_autocast_enabled():
        return _COARSE
    return max((_TOLERANCE.get(dtype, _COARSE) for dtype in dtypes), default=_TOLERANCE[torch.float32])


def compare(call: Call, batch: int) -> Finding | None:
    """Run the call on all of its samples and on a few, and compare; None if that proves nothing.

    Samples may lie along dim 0 or 1 of the inputs: the call is innocent if it is so for one of them.
    """
    found = [one for dim in _DIMS if (one := _compare_along(call, batch, dim)) is not None]
    return min(found, key=lambda one: (bool(one.buffers), one.difference)) if found else None


def _compare_along(call: Call, batch: int, dim: int) -> Finding | None:
    inputs = [t for t in leaves((call.args, call.kwargs)) if isinstance(t, Tensor)]
    if batch < 2 or not any(t.ndim > dim and t.shape[dim] == batch for t in inputs):
        return None
    for evaluating in (False, True):
        with _without_randomness(call.module, evaluating), torch.no_grad():
            try:
                found = _differences(call, batch, dim, not evaluating)
            except Exception:  # the module knows why it cannot be called with fewer samples; nothing is proven then
                return None
        if found is not None:
            return found
    return None


def _differences(call: Call, batch: int, dim: int, training: bool) -> Finding | None:
    """None if outputs are random, or have no place for samples."""
    few = min(batch // 2, _FEW)
    first, last = list(range(few)), list(range(batch - few, batch))
    some, buffers = _run(call, batch, first, dim, seed=0)
    again, other_seed = _run(call, batch, first, dim, seed=1)
    if not all(_close(a, b) for a, b in zip(some, again, strict=True)):
        return None
    others, other_buffers = _run(call, batch, last, dim, seed=0)
    full, _ = _run(call, batch, list(range(batch)), dim, seed=0)
    found = [
        d for d in (_difference(full, some, first, batch), _difference(full, others, last, batch)) if d is not None
    ]
    changed = {name for name in buffers if not _close(buffers[name], other_buffers[name])}
    if training:
        changed.update(_written(call, buffers, other_seed))
    return Finding(max(found), tuple(sorted(changed))) if found else None


def _run(call: Call, batch: int, samples: Sequence[int], dim: int, seed: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs for some of the samples, and the buffers afterwards; the module's own buffers stay as they are."""

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim > dim and leaf.shape[dim] == batch:
            return leaf.index_select(dim, torch.tensor(samples, device=leaf.device))
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    torch.manual_seed(seed)
    buffers = {name: _start(call, name, b).clone() for name, b in call.module.named_buffers()}
    output = torch.func.functional_call(call.module, buffers, tree_map(take, call.args), tree_map(take, call.kwargs))
    return [t for t in leaves(output) if isinstance(t, Tensor) and t.is_floating_point()], buffers


def _written(call: Call, some: Mapping[str, Tensor], other_seed: Mapping[str, Tensor]) -> Iterator[str]:
    """Buffers into which the call has written what calls on fewer samples do not, from the same start and any seed."""
    for name, after in call.after.items():
        comparable = name in some and after.shape == some[name].shape and _close(some[name], other_seed[name])
        if comparable and not _close(some[name], after):
            yield name


def _start(call: Call, name: str, now: Tensor) -> Tensor:
    """A buffer as the call has found it; or as it is now, if it has grown: a cache for longer inputs."""
    before = call.before.get(name, now)
    return before if before.shape == now.shape else now


@contextmanager
def _without_randomness(module: nn.Module, evaluating: bool) -> Iterator[None]:
    """Dropout off, or everything in eval mode; random generators and modes are as before afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    rates = [(part, part.dropout) for part in module.modules() if isinstance(part, (nn.RNNBase, nn.MultiheadAttention))]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            for part, _ in modes:
                part.training = part.training and not evaluating and not isinstance(part, _DROPOUTS)
            for part, _ in rates:
                part.dropout = 0.0
            yield
    finally:
        for part, training in modes:
            part.training = training
        for part, rate in rates:
            part.dropout = rate


def _difference(full: Sequence[Tensor], some: Sequence[Tensor], samples: Sequence[int], batch: int) -> float | None:
    """The largest relative difference of the same samples' outputs; None if none has a place for samples."""
    if len(full) != len(some):
        return None
    found = [d for a, b in zip(full, some, strict=True) if (d := _distance(a, b, samples, batch)) is not None]
    return max(found) if found else None


def _distance(full: Tensor, some: Tensor, samples: Sequence[int], batch: int) -> float | None:
    """For one tensor, by the most favourable of the places where the samples can lie in it."""
    if full.ndim != some.ndim:
        return None
    found: list[float] = []
    index = torch.tensor(samples, device=full.device)
    for dim in range(full.ndim):
        times, rest = divmod(full.shape[dim], batch)
        if rest or not times or some.shape[dim] != times * len(samples):
            continue
        for inner in (True, False) if times > 1 else (True,):
            split = (batch, times) if inner else (times, batch)
            taken = full.unflatten(dim, split).index_select(dim if inner else dim + 1, index).flatten(dim, dim + 1)
            if taken.shape == some.shape:
                found.append(_relative(taken, some))
    return min(found) if found else None


def _relative(a: Tensor, b: Tensor) -> float:
    """The largest difference over the largest entry; NaN and equal infinities do not differ."""
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=torch.inf)).max()
    size = a.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return 0.0 if gap == 0 else float(gap / size.clamp(min=1e-30))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and _relative(a, b) < 1e-5
