"""One function of data and expanded weights, recorded by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..factors import Factor, one_by_one
from ..trees import leaves, tree_map
from .engine import is_computed_from
from .functions import Known, is_in_place, name_of
from .gate import Receiver, Recording, attach
from .inputs import StandIns, holds_batch
from .samples import Samples, along

if TYPE_CHECKING:
    from .weight import ExpandedWeight

CANNOT_HANDLE = "Expanded Weights encountered but cannot handle function"  # the words of PyTorch's own


def call_alone(
    cls: type[ExpandedWeight],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rule: Known | None,
    weights: Sequence[ExpandedWeight],
) -> Any:
    """The result of a function, attached to the user's graph by a gate; if it is of weights alone, a weight."""
    data = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor) and not isinstance(t, cls)]
    samples = _samples(func, rule, data, weights)
    if samples is None or not torch.is_grad_enabled():
        args, kwargs = cls.unwrap((args, kwargs))
        return _as_weights(cls, func(*args, **kwargs), weights)
    if is_in_place(func):
        raise RuntimeError(
            f"{CANNOT_HANDLE} {name_of(func)}, which changes data in place by an expanded weight: use the form that "
            f"returns a new tensor"
        )
    place, stand_ins = None if rule is None else rule.alone, StandIns()
    args, kwargs = tree_map(partial(_replaced, cls, stand_ins, None if place else samples), (args, kwargs))
    result = func(*args, **kwargs)
    outputs = [leaf for leaf in leaves(result) if _wants_gradient(leaf)]
    inputs = [leaf for _, leaf in stand_ins.pairs()]
    if place is not None:
        place((args, kwargs), result, samples)
        _check_located(func, outputs, samples)
    elif outputs and inputs and not is_computed_from(outputs, inputs):  # only the data's dtype or shape was used
        return _as_weights(cls, result, weights)
    else:
        _tell_inputs(inputs, samples)
    attached = _attached(name_of(func), outputs, stand_ins, samples, weights, follow=place is None)
    return tree_map(lambda leaf: attached.get(id(leaf), leaf), result)


def _attached(
    what: str,
    outputs: Sequence[Tensor],
    stand_ins: StandIns,
    samples: Samples,
    weights: Sequence[ExpandedWeight],
    *,
    follow: bool,
) -> dict[int, Tensor]:
    """The outputs as the user's graph sees them, behind a gate; by the ids of those that the function returned."""
    bases = list({id(base): base for weight in weights for base in weight.bases}.values())
    recording = Recording(
        what=what,
        leaves={str(i): base.leaf for i, base in enumerate(bases)},
        inputs=[leaf for _, leaf in stand_ins.pairs()],
        outputs=outputs,
        samples=samples,
        receive=_Writer(bases).open,
        working=[base.working for base in bases],
        follow=follow,
        shared=any(bool(weight.sources) for weight in weights),
    )
    wanted = [x for x, _ in stand_ins.pairs() if x.requires_grad]
    return dict(zip(map(id, outputs), attach(recording, [b.orig_weight for b in bases], wanted), strict=True))


def _tell_inputs(inputs: Sequence[Tensor], samples: Samples) -> None:
    """The data of a function that is followed carry their samples in the batch dim."""
    for x in inputs:
        if x.numel() and _is_data(x, samples):
            samples.tell(x, along(x.shape, samples.dim, samples.batch))


def _as_weights(cls: type[ExpandedWeight], result: Any, weights: Sequence[ExpandedWeight]) -> Any:
    """A result that was computed from weights alone, as weights."""
    return tree_map(lambda leaf: cls.computed(leaf, weights) if _wants_gradient(leaf) else leaf, result)


def _replaced(cls: type[ExpandedWeight], stand_ins: StandIns, followed: Samples | None, leaf: Any) -> Any:
    """An argument as the function sees it: weights, what wants a gradient, and ``followed`` data are leaves."""
    if isinstance(leaf, cls):
        return leaf.leaf
    if isinstance(leaf, nn.Parameter) and leaf.requires_grad:
        return stand_ins.of_parameter(leaf)
    wanted = _wants_gradient(leaf) or (followed is not None and _is_data(leaf, followed))
    return stand_ins[leaf] if wanted else leaf


def _wants_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _is_data(leaf: Any, samples: Samples) -> bool:
    """Are these numbers with a batch, and no parameter that is not expanded?"""
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return False
    return (leaf.is_floating_point() or leaf.is_complex()) and holds_batch(leaf, samples.batch, samples.dim)


def _check_located(func: Callable[..., Any], outputs: Sequence[Tensor], samples: Samples) -> None:
    for y in outputs:
        if not samples.knows(y):
            raise RuntimeError(
                f"{CANNOT_HANDLE} {name_of(func)} that returned shape {tuple(y.shape)}, in which there is no batch "
                f"of {samples.batch} samples, the batch size of the expanded weights"
            )


def _samples(
    func: Callable[..., Any], rule: Known | None, data: Sequence[Tensor], weights: Sequence[ExpandedWeight]
) -> Samples | None:
    """Where the batch is; None if there is none, because only weights and constants meet."""
    first = weights[0]
    _check_agreement(func, weights)
    dim = (0 if first.batch_first else 1) if rule is None or rule.dim is None else rule.dim
    batch, sizes = first.batch_size, [t.shape[dim] for t in data if t.ndim > dim]
    if rule is not None and rule.alone is not None:
        return Samples(min(sizes[0], batch) if first.allow_smaller_batches and sizes else batch, dim)
    for n in sizes:
        if n == batch or (first.allow_smaller_batches and 0 < n < batch):
            return Samples(n, dim)
    if any(t.requires_grad for t in data):
        raise RuntimeError(
            f"{CANNOT_HANDLE} {name_of(func)} of data of shapes {[tuple(t.shape) for t in data]} and an expanded "
            f"weight of batch size {first.batch_size}. Expected ExpandedWeights to have batch size matching input, in "
            f"dim {dim} of the data"
        )
    return None


def _check_agreement(func: Callable[..., Any], weights: Sequence[ExpandedWeight]) -> None:
    """Refuse weights that do not agree on what the batch is."""
    first = weights[0]
    for weight in weights:
        if (weight.batch_size, weight.loss_reduction, weight.batch_first) != (
            first.batch_size,
            first.loss_reduction,
            first.batch_first,
        ):
            raise RuntimeError(
                f"{_disagreement(first, weight)}: {name_of(func)} was given expanded weights that disagree: batch_size "
                f"{first.batch_size} and {weight.batch_size}, loss_reduction {first.loss_reduction!r} and "
                f"{weight.loss_reduction!r}, batch_first {first.batch_first} and {weight.batch_first}"
            )


def _disagreement(one: ExpandedWeight, other: ExpandedWeight) -> str:
    """What PyTorch's own expanded weights say of two that disagree."""
    if one.loss_reduction != other.loss_reduction:
        return "Expected ExpandedWeights to all have the same loss_reduction argument"
    if one.batch_first != other.batch_first:
        return "Got conflicting batch_first arguments in the same layer"
    return "Expected ExpandedWeights to have batch size matching input"


@dataclass
class _Writer:
    """Adds to ``grad_sample`` what one backward brings."""

    bases: Sequence[ExpandedWeight]
    written: bool = False

    @contextmanager
    def open(self) -> Iterator[Receiver]:
        if self.written and any(getattr(b.orig_weight, "grad_sample", None) is not None for b in self.bases):
            raise RuntimeError(
                "backward came a second time to a function of expanded weights whose grad_sample is still there: "
                "set grad_sample to None before"
            )
        self.written = True
        yield Receiver(one_by_one(lambda name, factor: write(factor, self.bases[int(name)])))
        for base in self.bases:
            orig = base.orig_weight
            if getattr(orig, "grad_sample", None) is None:  # no element of it was reached
                orig.grad_sample = orig.detach().new_zeros(base.batch_size, *orig.shape)  # type: ignore[attr-defined]


def write(factor: Factor, weight: ExpandedWeight) -> None:
    """Add a factor to ``grad_sample``."""
    orig = weight.orig_weight
    add_grad_sample(weight, factor.stack(orig.detach().new_empty(factor.batch, *orig.shape)))


def add_grad_sample(weight: ExpandedWeight, rows: Tensor) -> None:
    """Add rows to those that earlier uses have written; if there are fewer than samples, the last ones get zeros."""
    missing = rows.new_zeros(weight.batch_size - len(rows), *rows.shape[1:])
    rows = torch.cat([rows, missing]) if len(missing) else rows
    rows = rows if weight.scale == 1 else rows * weight.scale
    before = getattr(weight.orig_weight, "grad_sample", None)
    weight.orig_weight.grad_sample = rows if before is None else before + rows  # type: ignore[attr-defined]
