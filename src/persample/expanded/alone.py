"""One function of data and expanded weights, recorded by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..factors import Factor, one_by_one
from ..graph.nodes import children
from ..graph.roots import slot_of
from ..graph.traverse import leading_to
from ..trees import leaves, tree_map
from .gate import Receiver, Recording, attach
from .inputs import StandIns, holds_batch
from .registry import Shipped, name_of
from .samples import Samples, along

if TYPE_CHECKING:
    from .weight import ExpandedWeight

CANNOT_HANDLE = "Expanded Weights encountered but cannot handle function"  # the words of PyTorch's own


def call_alone(
    cls: type[ExpandedWeight],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rule: Shipped | None,
    weights: Sequence[ExpandedWeight],
) -> Any:
    """Its result, attached to the user's graph by a gate; of weights alone, a weight."""
    data = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor) and not isinstance(t, cls)]
    samples = _samples(func, rule, data, weights)
    if samples is None or not torch.is_grad_enabled():
        args, kwargs = cls.unwrap((args, kwargs))
        result = func(*args, **kwargs)
        return tree_map(lambda leaf: _computed(cls, leaf, weights), result)
    if _writes(func):
        raise RuntimeError(
            f"{CANNOT_HANDLE} {name_of(func)}, which changes data in place by an expanded weight: use the form that "
            f"returns a new tensor"
        )
    follow = rule is None or rule.place is None
    stand_ins = StandIns()

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, cls):
            return leaf.leaf
        if isinstance(leaf, nn.Parameter) and leaf.requires_grad:
            return stand_ins.of_parameter(leaf)
        if isinstance(leaf, Tensor) and (leaf.requires_grad or (follow and _holds_samples(leaf, samples))):
            return stand_ins[leaf]
        return leaf

    args, kwargs = tree_map(replace, (args, kwargs))
    result = func(*args, **kwargs)
    inner = [leaf for _, leaf in stand_ins.pairs()]
    if follow and not _reached(result, inner):  # data lent their dtype or shape only
        return tree_map(lambda leaf: _computed(cls, leaf, weights), result)
    _place(func, rule, (args, kwargs), result, samples, inner)
    wanted = [x for x, _ in stand_ins.pairs() if x.requires_grad]
    outputs = [t for t in leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    bases = list({id(base): base for weight in weights for base in weight.bases}.values())
    recording = Recording(
        what=name_of(func),
        leaves={str(i): base.leaf for i, base in enumerate(bases)},
        inputs=inner,
        outputs=outputs,
        samples=samples,
        receive=_Writer(bases).open,
        working=[base.working for base in bases],
        follow=follow,
        shared=any(bool(weight.sources) for weight in weights),
    )
    attached = dict(zip(map(id, outputs), attach(recording, [b.orig_weight for b in bases], wanted), strict=True))
    return tree_map(lambda leaf: attached.get(id(leaf), leaf), result)


def _reached(result: Any, inner: Iterable[Tensor]) -> bool:
    """Was the result computed from any of these?"""
    nodes = [slot_of(t)[0] for t in leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    goals = {slot_of(x)[0] for x in inner}
    return not nodes or not goals or bool(leading_to(nodes, goals, children))


def _writes(func: Callable[..., Any]) -> bool:
    """Does the function change its first argument?"""
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__set__") or bool(re.fullmatch(r"__i[a-z]+__|[a-z]\w*[a-z0-9]_", name))


def _computed(cls: type[ExpandedWeight], leaf: Any, weights: Sequence[ExpandedWeight]) -> Any:
    is_weight = isinstance(leaf, Tensor) and leaf.requires_grad
    return cls.computed(leaf, weights) if is_weight else leaf


def _holds_samples(t: Tensor, samples: Samples) -> bool:
    numbers = t.is_floating_point() or t.is_complex()
    return numbers and not isinstance(t, nn.Parameter) and holds_batch(t, samples.batch, samples.dim)


def _samples(
    func: Callable[..., Any], rule: Shipped | None, data: Sequence[Tensor], weights: Sequence[ExpandedWeight]
) -> Samples | None:
    """Where the batch is; None if there is none, because only weights and constants meet."""
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
    dim = (0 if first.batch_first else 1) if rule is None or rule.dim is None else rule.dim
    sizes = [t.shape[dim] for t in data if t.ndim > dim]
    if rule is not None and rule.place is not None:
        if not first.allow_smaller_batches:
            return Samples(first.batch_size, dim)
        return Samples(min(sizes[0], first.batch_size) if sizes else first.batch_size, dim)
    fitting = [n for n in sizes if n == first.batch_size or (first.allow_smaller_batches and 0 < n < first.batch_size)]
    if fitting:
        return Samples(fitting[0], dim)
    if any(t.requires_grad for t in data):
        raise RuntimeError(
            f"{CANNOT_HANDLE} {name_of(func)} of data of shapes {[tuple(t.shape) for t in data]} and an expanded "
            f"weight of batch size {first.batch_size}. Expected ExpandedWeights to have batch size matching input, in "
            f"dim {dim} of the data"
        )
    return None


def _disagreement(one: ExpandedWeight, other: ExpandedWeight) -> str:
    """What PyTorch's own expanded weights say of it."""
    if one.loss_reduction != other.loss_reduction:
        return "Expected ExpandedWeights to all have the same loss_reduction argument"
    if one.batch_first != other.batch_first:
        return "Got conflicting batch_first arguments in the same layer"
    return "Expected ExpandedWeights to have batch size matching input"


def _place(
    func: Callable[..., Any],
    rule: Shipped | None,
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    result: Any,
    samples: Samples,
    inner: Sequence[Tensor],
) -> None:
    """Tell where the samples lie: in the results by rule, else in the data."""
    if rule is not None and rule.place is not None:
        rule.place(arguments, result, samples)
        for t in leaves(result):
            if isinstance(t, Tensor) and t.requires_grad and not samples.knows(t):
                raise RuntimeError(
                    f"{CANNOT_HANDLE} {name_of(func)} that returned shape {tuple(t.shape)}, in which there is no batch "
                    f"of {samples.batch} samples, the batch size of the expanded weights"
                )
    else:
        for x in inner:
            if x.numel() and _holds_samples(x, samples):
                samples.tell(x, along(x.shape, samples.dim, samples.batch))


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
        yield Receiver(one_by_one(lambda name, factor: add_grad_sample(self.bases[int(name)], factor)))
        for base in self.bases:
            orig = base.orig_weight
            if getattr(orig, "grad_sample", None) is None:  # no element of it was reached
                orig.grad_sample = orig.detach().new_zeros(base.batch_size, *orig.shape)  # type: ignore[attr-defined]


def add_grad_sample(weight: ExpandedWeight, factor: Factor) -> None:
    """Write a factor out, or add it to what earlier uses have written; missing samples are the last ones."""
    orig, count = weight.orig_weight, weight.batch_size
    stack = orig.detach().new_zeros(count, *orig.shape)
    factor.stack(stack[: factor.batch])
    if weight.scale != 1:
        stack *= weight.scale
    before = getattr(orig, "grad_sample", None)
    orig.grad_sample = stack if before is None else before + stack  # type: ignore[attr-defined]
