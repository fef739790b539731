"""Results of reductions taken apart into tensors, which a graph can return, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..kernels.norms import wide
from ..refusal import NotCompiled
from .clipping import ClippedDict, ClippedTuple, Clipping

Parts = Iterator[Tensor]
Rebuild = Callable[[Parts], Any]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def take_apart(result: Any) -> tuple[list[Tensor], Rebuild]:
    """All tensors in a result, and how to make one like it of others."""
    tensors: list[Tensor] = []
    return tensors, _rebuild(result, tensors)


def _rebuild(result: Any, tensors: list[Tensor]) -> Rebuild:
    kind = type(result)
    if isinstance(result, Tensor):
        tensors.append(result)
        return next
    if isinstance(result, _PLAIN) or (kind is tuple and all(isinstance(value, _PLAIN) for value in result)):
        return lambda parts: result
    if kind is dict:
        return _dict(result, tensors)
    if kind is Clipping:
        return _clipping(result, tensors)
    if kind in (ClippedDict, ClippedTuple):
        sums = _rebuild(dict(result) if kind is ClippedDict else tuple(result), tensors)
        return _clipped(kind, sums, _rebuild(result.clipping, tensors))
    if isinstance(result, (tuple, list)):
        each = [_rebuild(value, tensors) for value in result]
        make: Any = kind._make if hasattr(kind, "_make") else kind
        return lambda parts: make([item(parts) for item in each])
    if is_dataclass(result):
        return _record(result, tensors)
    raise NotCompiled(f"a result is a {kind.__name__}, of which only its maker knows how to make another")


def plain_parts(result: Any) -> list[Any]:
    """All in a result that is no tensor: kinds of containers, keys, numbers."""
    if isinstance(result, (Tensor, *_PLAIN)):
        return [Tensor if isinstance(result, Tensor) else (type(result), result)]
    parts: list[Any] = [type(result)]
    if isinstance(result, Clipping):
        parts.append((list(result.dropped), result.sensitivity))
    if isinstance(result, dict):
        parts += result
    inside = result.values() if isinstance(result, dict) else result if isinstance(result, (tuple, list)) else ()
    if is_dataclass(result):
        inside = [getattr(result, f.name) for f in fields(result)]
    return parts + [part for value in (*inside, getattr(result, "clipping", None)) for part in plain_parts(value)]


def _dict(result: dict[Any, Any], tensors: list[Tensor]) -> Rebuild:
    if all(isinstance(value, Tensor) for value in result.values()):
        tensors += result.values()
        keys = list(result)
        return lambda parts: {key: next(parts) for key in keys}
    each = {key: _rebuild(value, tensors) for key, value in result.items()}
    return lambda parts: {key: make(parts) for key, make in each.items()}


def _record(result: Any, tensors: list[Tensor]) -> Rebuild:
    each = {f.name: _rebuild(getattr(result, f.name), tensors) for f in fields(result)}

    def make(parts: Parts) -> Any:
        made = copy(result)
        for name, value in each.items():
            object.__setattr__(made, name, value(parts))
        return made

    return make


def _clipping(result: Clipping, tensors: list[Tensor]) -> Rebuild:
    norms, weights = (_rebuild(value, tensors) for value in result)
    return lambda parts: Clipping(norms(parts), weights(parts), list(result.dropped), result.sensitivity)


def _clipped(kind: type[Any], sums: Rebuild, clipping: Rebuild) -> Rebuild:
    def make(parts: Parts) -> Any:
        made = kind(sums(parts))
        made.clipping = clipping(parts)
        return made

    return make


# By how much two ways to compute the same may differ: of a tensor's own size, and of the largest one's beside it. In a
# deep network, the last digit of a number near zero decides whether a ReLU lets it pass.
_OWN = {torch.float64: 1e-6, torch.float32: 2e-2, torch.bfloat16: 0.2, torch.float16: 0.05}
_LARGEST = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def differing(got: Any, want: Any, narrowest: torch.dtype = torch.float64) -> str | None:
    """What to say of the first tensor in which two results differ by more than rounding; None if there is none.

    A gradient that would be zero without rounding (of a bias before a norm) has nothing but rounding errors, of the
    size of other gradients: all tensors of a result are measured by the largest of them, too. ``narrowest`` is the
    dtype of the fewest digits on the way to them.
    """
    ours, theirs = take_apart(got)[0], take_apart(want)[0]
    if [(t.shape, t.dtype) for t in ours] != [(t.shape, t.dtype) for t in theirs]:
        return "the results have other shapes or dtypes"
    if plain_parts(got) != plain_parts(want):
        return "the results differ in what is no tensor"
    largest = max([_size(t) for t in theirs], default=0.0)
    for a, b in zip(ours, theirs, strict=True):
        if b.is_floating_point() or b.is_complex():
            dtype = max(b.dtype.to_real(), narrowest, key=lambda kind: torch.finfo(kind).eps)
            apart = _gap(a, b)
            if not apart <= _OWN.get(dtype, 0.1) * _size(b) + _LARGEST.get(dtype, 0.01) * largest:
                return f"a tensor of shape {tuple(b.shape)} is off by {apart:.2g}, of {_size(b):.2g}"
        elif not torch.equal(a, b):
            return f"a tensor of shape {tuple(b.shape)} has other numbers"
    return None


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of two elements; infinite where one alone is infinite or NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    gaps = torch.where(same, 0, (a - b).abs()).to(torch.float64).nan_to_num(inf, inf)
    return float(gaps.max()) if gaps.numel() else 0.0


def _size(t: Tensor) -> float:
    """The largest finite element."""
    if not t.numel() or not (t.is_floating_point() or t.is_complex()):
        return 0.0
    size = t.abs().to(wide(t.dtype.to_real()))
    return float(torch.where(size < inf, size, 0).max()) if bool((size < inf).any()) else 0.0
