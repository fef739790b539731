"""Following data from the inputs of a call to where they meet weights, or what was computed from weights.

Functions of data leave no trace in the graph. They are noted here and, when a backward wants to know where a tensor
carries its samples and whether it keeps them apart, run again with some samples changed (`replay`). Notes name what
they were made from by number and hold no data, so that nothing lives longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..graph.layout import Shape
from ..graph.nodes import NodeSlot
from ..graph.roots import slot_of
from ..graph.saved import version
from ..trees import leaves, tree_map
from .judge import Choices, judged
from .origins import SMALL, Origins
from .replay import Made, Place, Replay, Source, Step, Stranger
from .verdicts import Verdict
from .weight import ExpandedWeight

_MOST = 1024  # functions that are noted
_KEPT = 4096  # answers

# Functions that leave samples where they are, whatever is in the integers, masks and constants they are given.
_BY_SHAPE = frozenset(
    """
    add radd iadd sub rsub isub mul rmul imul div rdiv truediv rtruediv true_divide neg abs pow rpow exp log sqrt rsqrt
    sigmoid tanh relu gelu silu clamp clamp_min clamp_max where masked_fill eq ne lt le gt ge logical_and logical_or
    logical_not and or invert bitwise_and bitwise_or bitwise_not to float double half bfloat16 long int bool type
    type_as view reshape flatten unflatten unsqueeze squeeze permute transpose t movedim expand expand_as contiguous
    clone detach get embedding softmax log_softmax scaled_dot_product_attention zeros_like ones_like rand_like
    randn_like empty_like flip roll sort cumsum cumprod mod rmod remainder fmod floordiv rfloordiv floor_divide minimum
    maximum amax amin max min sum mean all any cat stack chunk split unbind select repeat tile pad triu tril diff argmax
    argmin cross_entropy nll_loss
    """.split()
)


@dataclass(frozen=True)
class _Meeting:
    """A result of data and of weights, or of what was computed from weights."""

    slot: NodeSlot
    shape: Shape
    place: Place
    direct: bool  # is it a function of unchanged inputs?


_FOUND: dict[Any, Verdict] = {}  # of functions and shapes that were seen before


class Followed(TorchFunctionMode):
    """Notes functions of the call's inputs, up to where they meet weights."""

    def __init__(self, sources: Sequence[Source], batch: int, dim: int, module: nn.Module, others: Iterable[Tensor]):
        super().__init__()
        self._sources, self._batch, self._dim = sources, batch, dim
        self._numbers = {id(source.tensor): number for number, source in enumerate(sources)}  # of data that live, by id
        self._next = len(sources)
        own = [*module.parameters(), *module.buffers()]
        self._own = {id(t) for t in own if t.is_floating_point()}
        self._origins = Origins(own, others)
        self._alive: list[weakref.ref[Tensor]] = []
        self._steps: list[Step] = []
        self._meetings: list[_Meeting] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or len(self._steps) >= _MOST:
            self._origins.lose_track()
            return func(*args, **kwargs)
        if self._has_data(args) or (kwargs and self._has_data(kwargs.values())):
            return self._of_data(func, args, kwargs)
        return self._origins.follow(func, args, kwargs)

    def _has_data(self, values: Iterable[Any]) -> bool:
        numbers = self._numbers
        return any(id(v) in numbers or (isinstance(v, (list, tuple)) and self._has_data(v)) for v in values)

    def _of_data(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = [_version(t) for t in given]
        active = any(self._is_active(t) for t in given)
        result = func(*args, **kwargs)
        changes = tuple(i for i, t in enumerate(given) if _version(t) != before[i])
        returned = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        outputs = returned + [given[i] for i in changes]
        self._origins.meet_data(func, [given[i] for i in changes])
        if outputs and all(self._can_be_replaced(t) for t in given) and not _has_offsets(func, args, kwargs):
            self._note(func, args, kwargs, given, outputs, changes, active)
        else:
            for t in outputs:  # what it was is gone
                self._numbers.pop(id(t), None)
        return result

    def _note(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        outputs: Sequence[Tensor],
        changes: tuple[int, ...],
        active: bool,
    ) -> None:
        changed = {id(given[i]) for i in changes}
        args, kwargs = tree_map(lambda leaf: self._replaced(leaf, id(leaf) in changed), (args, kwargs))
        if kwargs.get("out") is not None:
            kwargs, outputs, changes = {**kwargs, "out": None}, outputs[: len(outputs) - len(changes)], ()
            for t in outputs:
                self._numbers.pop(id(t), None)  # what it was is gone
        numbers: list[int | None] = []
        raw = not any(step.changes for step in self._steps) and all(
            self._numbers.get(id(t), 0) < len(self._sources) for t in given
        )
        for k, t in enumerate(outputs):
            if id(t) not in changed and any(t is g for g in given):  # itself
                numbers.append(None)
            elif active and t.requires_grad and t.grad_fn is not None:
                numbers.append(None)
                place = (len(self._steps), k)
                self._meetings.append(_Meeting(slot_of(t), tuple(t.shape), place, raw and not changes))
            else:
                numbers.append(self._number(t))
        self._steps.append(Step(func, args, kwargs, tuple(numbers), changes, self._by_shape(func, given)))

    def _number(self, t: Tensor) -> int:
        """That of a tensor of data; a new one, if it has none."""
        if id(t) not in self._numbers:
            self._numbers[id(t)] = self._next
            self._next += 1
            self._watch(t)
        return self._numbers[id(t)]

    def _watch(self, t: Tensor) -> None:
        """Forget a tensor's id when it dies."""
        key, numbers = id(t), self._numbers
        self._alive.append(weakref.ref(t, lambda _: numbers.pop(key, None)))

    def is_weight(self, t: Tensor) -> bool:
        """Is it a weight, or computed from weights alone?"""
        return self._origins.is_weight(t)

    def tables(self) -> Sequence[NodeSlot]:
        """What was computed from weights, and from constants that no input went into."""
        return self._origins.tables()

    def _is_active(self, t: Tensor) -> bool:
        """Is it a weight, or computed from weights and whatever else?"""
        return isinstance(t, ExpandedWeight) or (t.requires_grad and id(t) not in self._numbers)

    def _can_be_replaced(self, t: Tensor) -> bool:
        """Data are given again, constants are kept, and other numbers are replaced by noise; indices cannot be."""
        return id(t) in self._numbers or self._origins.is_shared(t) or t.is_floating_point() or t.is_complex()

    def _replaced(self, leaf: Any, changed: bool) -> Any:
        """An argument as it is noted."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._numbers:
            return Made(self._numbers[id(leaf)])
        if changed or not self._origins.is_shared(leaf):
            return Stranger(leaf)
        return ExpandedWeight.unwrap(leaf)

    def _by_shape(self, func: Callable[..., Any], given: Sequence[Tensor]) -> bool:
        """Do shapes alone decide where this function leaves the samples?"""
        alone = len(given) == 1 and _plain_name(func) == "getitem"
        return (
            alone
            or _plain_name(func) in _BY_SHAPE
            or all(t.is_floating_point() or t.is_complex() or id(t) not in self._numbers for t in given)
        )

    def found(self, choices: Choices, known: Collection[NodeSlot]) -> dict[NodeSlot, Verdict]:
        """What running again shows of results of data and weights; those of unchanged inputs may be known already."""
        found, replay = {}, Replay(self._steps, self._sources, self._batch)
        for meeting in self._meetings:
            if meeting.direct and meeting.slot in known:
                continue
            key = self._signature(replay, meeting)
            verdict = None if key is None else _FOUND.get(key)
            if verdict is None:
                verdict = judged(replay, meeting.place, choices)
                if key is not None:
                    _FOUND[key] = verdict
            found[meeting.slot] = verdict
        while len(_FOUND) > _KEPT:
            _FOUND.pop(next(iter(_FOUND)))
        return found

    def _signature(self, replay: Replay, meeting: _Meeting) -> tuple[Any, ...] | None:
        """Functions and shapes, if the same ones always leave samples in the same place."""
        parts: list[Any] = [self._batch, self._dim, meeting.place[1]]
        parts += [(tuple(s.tensor.shape), s.tensor.dtype, s.tensor.stride()) for s in self._sources]
        for i in replay.needed(meeting.place):
            step = self._steps[i]
            if not step.by_shape:
                return None
            parts += [step.func, step.numbers]
            for leaf in leaves((step.args, tuple(step.kwargs.items()))):
                part = self._part(leaf, _plain_name(step.func) in _BY_SHAPE)
                if part is None:
                    return None
                parts.append(part)
        return tuple(parts)

    def _part(self, leaf: Any, by_shape: bool) -> Any:
        """What counts of an argument; None if more than can be compared."""
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        if id(leaf) not in self._own and not leaf.requires_grad and leaf.numel() <= SMALL:
            return tuple(leaf.shape), leaf.dtype, tuple(leaf.detach().flatten().tolist())
        shape_counts = by_shape or (leaf.is_floating_point() and (id(leaf) in self._own or leaf.requires_grad))
        return (tuple(leaf.shape), leaf.dtype) if shape_counts else None


def _version(t: Tensor) -> int:
    """How often it was changed in place; weights are not, and tensors made for inference do not say."""
    return 0 if isinstance(t, ExpandedWeight) or t.is_inference() else version(t)


def _has_offsets(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Bags end where the next sample's begin, so that their offsets are no data of one sample."""
    return _plain_name(func) == "embedding_bag" and (args[2] if len(args) > 2 else kwargs.get("offsets")) is not None


def _plain_name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "").strip("_")
