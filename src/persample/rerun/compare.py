"""Comparing what a call gives for the same samples in a smaller batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..trees import leaves
from .calls import RecordedCall
from .run import SampleDim, run_again, without_dropout

_SAMPLE_DIMS = (0, 1)  # dims of the inputs that samples may lie along
_FEW = 4  # samples of a smaller batch
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE_TOLERANCE = 5e-2  # for half precision
_EQUAL = 1e-5  # relative difference below which two runs on the same samples count as equal


@dataclass(frozen=True)
class Comparison:
    """By how much outputs of the same samples differ, relative to the largest; and buffers that took up data."""

    difference: float
    buffers: tuple[str, ...] = ()


def rounding_tolerance(model: nn.Module) -> float:
    """The difference allowed for rounding, which varies with the batch size; coarse if anything has half precision."""
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()]
    if any(torch.is_autocast_enabled(kind) for kind in {"cpu", *[t.device.type for t in tensors]}):
        return _COARSE_TOLERANCE
    dtypes = {t.dtype for t in tensors}
    return max((_TOLERANCE.get(dtype, _COARSE_TOLERANCE) for dtype in dtypes), default=_TOLERANCE[torch.float32])


def compare_with_fewer_samples(
    call: RecordedCall, batch: int, together: Sequence[int] | None = None
) -> Comparison | None:
    """Run the call on all of its samples and on a few, and compare; None if that proves nothing.

    Samples may lie along dim 0 or 1 of the inputs: the comparison that speaks most in favour of the call counts. Those
    that may depend on each other, so many ``together`` one after another, are run together.
    """
    ends = _ends(batch, together)
    comparisons = [_compare_along(call, SampleDim(batch, dim), ends) for dim in _SAMPLE_DIMS] if ends else []
    conclusive = [one for one in comparisons if one is not None]
    return min(conclusive, key=lambda one: (bool(one.buffers), one.difference), default=None)


@dataclass(frozen=True)
class _Ends:
    """Samples at the two ends of a batch, which are run without the others."""

    first: list[int]
    last: list[int]


def _ends(batch: int, together: Sequence[int] | None) -> _Ends | None:
    """A few at each end, and no sample in both; None if there are not two."""
    sizes = [1] * batch if together is None else together
    few = min(len(sizes) // 2, _FEW)
    if not few:
        return None
    return _Ends(list(range(sum(sizes[:few]))), list(range(batch - sum(sizes[-few:]), batch)))


def _compare_along(call: RecordedCall, place: SampleDim, ends: _Ends) -> Comparison | None:
    if not any(place.holds_samples(value) for value in leaves((call.args, call.kwargs))):
        return None
    for evaluating in (False, True):
        with without_dropout(call.module, evaluating=evaluating), torch.no_grad():
            try:
                comparison = _compare_runs(call, place, ends, training=not evaluating)
            except Exception:  # the module knows why it cannot be called with fewer samples; nothing is proven then
                return None
        if comparison is not None:
            return comparison
    return None


def _compare_runs(call: RecordedCall, place: SampleDim, ends: _Ends, *, training: bool) -> Comparison | None:
    """All samples against the first few and the last few; None if outputs are random, or have no place for samples."""
    batch, first, last = place.batch, ends.first, ends.last
    first_outputs, first_buffers = run_again(call, place, first, seed=0)
    reseeded_outputs, reseeded_buffers = run_again(call, place, first, seed=1)
    if not all(_close(a, b) for a, b in zip(first_outputs, reseeded_outputs, strict=True)):
        return None
    last_outputs, last_buffers = run_again(call, place, last, seed=0)
    outputs, _ = run_again(call, place, list(range(batch)), seed=0)
    differences = [
        _largest_difference(outputs, first_outputs, first, batch),
        _largest_difference(outputs, last_outputs, last, batch),
    ]
    known = [difference for difference in differences if difference is not None]
    if not known:
        return None
    changed = {name for name in first_buffers if not _close(first_buffers[name], last_buffers[name])}
    if training:
        changed.update(_written_by_whole_batch(call, first_buffers, reseeded_buffers))
    return Comparison(max(known), tuple(sorted(changed)))


def _written_by_whole_batch(
    call: RecordedCall, few: Mapping[str, Tensor], reseeded: Mapping[str, Tensor]
) -> Iterator[str]:
    """Buffers into which the recorded call has written something else than a call on fewer samples, whatever the seed.

    ``few`` and ``reseeded`` are the buffers after two calls on the same few samples, with different seeds.
    """
    for name, after in call.buffers_after.items():
        comparable = name in few and after.shape == few[name].shape and _close(few[name], reseeded[name])
        if comparable and not _close(few[name], after):
            yield name


def _largest_difference(
    outputs: Sequence[Tensor], few: Sequence[Tensor], samples: Sequence[int], batch: int
) -> float | None:
    """The largest relative difference of the same samples' outputs; None if no output has a place for samples."""
    if len(outputs) != len(few):
        return None
    differences = [_difference(a, b, samples, batch) for a, b in zip(outputs, few, strict=True)]
    return max((d for d in differences if d is not None), default=None)


def _difference(output: Tensor, few: Tensor, samples: Sequence[int], batch: int) -> float | None:
    """The relative difference of one output, for the most favourable of the places where its samples can lie."""
    if output.ndim != few.ndim:
        return None
    candidates = _selections(output, few, samples, batch)
    return min((_relative(selected, few) for selected in candidates if selected.shape == few.shape), default=None)


def _selections(output: Tensor, few: Tensor, samples: Sequence[int], batch: int) -> Iterator[Tensor]:
    """Some samples of an output, along every dim that may hold them; T positions of each may be folded into the dim."""
    index = torch.tensor(samples, device=output.device)
    for dim in range(output.ndim):
        T, remainder = divmod(output.shape[dim], batch)
        if remainder or not T or few.shape[dim] != T * len(samples):
            continue
        yield output.unflatten(dim, (batch, T)).index_select(dim, index).flatten(dim, dim + 1)
        if T > 1:
            yield output.unflatten(dim, (T, batch)).index_select(dim + 1, index).flatten(dim, dim + 1)


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
    return a.shape == b.shape and _relative(a, b) < _EQUAL
