"""What factors are made of: their tensors, each with one row per sample, and how to make another of the same form."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.certificates import usual_size
from .base import Factor
from .combine import Sum, View
from .convolution import Convolution
from .dense import Dense
from .outer import Outer
from .rows import Rows

_LARGEST = 2**16  # numbers in a tensor; of larger ones, a copy costs more than it saves


class Form(NamedTuple):
    """A factor taken apart: ``make(tensors)`` is a factor like it."""

    kind: Hashable  # equal for factors that differ in nothing but their tensors
    tensors: tuple[Tensor, ...]
    make: Callable[[Sequence[Tensor]], Factor]


def form_of(factor: Factor) -> Form | None:
    """The form of a factor; None of those that are more than that, or that remember something."""
    if isinstance(factor, View):
        return _form_of_view(factor)
    if isinstance(factor, Sum):
        return _form_of_sum(factor)
    if type(factor) is Outer and factor.memo is None:
        scale = factor.scale
        return Form((Outer, scale), (factor.left, factor.right), lambda ts: Outer(ts[0], ts[1], scale))
    if type(factor) is Dense:
        return Form(Dense, (factor.value,), lambda ts: Dense(ts[0]))
    if type(factor) is Convolution:
        size, geometry = factor.size, factor.geometry
        tensors = (factor.x, factor.dy)
        return Form((Convolution, size, geometry), tensors, lambda ts: Convolution(ts[0], ts[1], size, geometry))
    if type(factor) is Rows:
        rows, skips = factor.size, factor.skips
        return Form((Rows, rows, skips), (factor.ids, factor.dy), lambda ts: Rows(ts[0], ts[1], rows, skips=skips))
    return None


def _form_of_view(factor: View) -> Form | None:
    inner = form_of(factor.base)
    if inner is None:
        return None
    kind, tensors, make = inner
    shape, rearrange = factor.shape, factor.rearrange
    return Form((View, shape, rearrange, kind), tensors, lambda ts: View(make(ts), shape, rearrange))


def _form_of_sum(factor: Sum) -> Form | None:
    forms = [form for term in factor.terms if (form := form_of(term)) is not None]
    if len(forms) < len(factor.terms):
        return None
    makes = [(form.make, len(form.tensors)) for form in forms]

    def make(tensors: Sequence[Tensor]) -> Factor:
        left = iter(tensors)
        return Sum([make_one(list(islice(left, count))) for make_one, count in makes])

    return Form((Sum, *[form.kind for form in forms]), tuple(t for form in forms for t in form.tensors), make)


def kind_of(form: Form) -> Hashable:
    """Equal for small factors that can be one with more samples; None for those that cannot be in any."""
    if any(usual_size(t.numel(), len(t)) > _LARGEST for t in form.tensors):
        return None
    return form.kind, tuple((tuple(t.shape), t.dtype, t.device) for t in form.tensors)


def together(forms: Sequence[Form]) -> Factor:
    """One factor for several parameters, if `kind_of` says that they are alike: samples of one after another's."""
    each = zip(*[form.tensors for form in forms], strict=True)
    return forms[0].make([torch.cat(tensors) for tensors in each])
