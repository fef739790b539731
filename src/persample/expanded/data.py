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

from ..graph.layout import Layout, Shape
from ..graph.roots import slot_of
from ..graph.saved import version
from ..graph.tape import Slot
from .registry import name_of
from .replay import Made, Place, Replay, Source, Step, Stranger, Unfit, Way, decoded, depends_on_several, fitting
from .samples import Verdict
from .trees import leaves, tree_map
from .weight import ExpandedWeight

_SMALL = 1024  # elements of a constant of unknown origin, as a mean or a scale
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

    slot: Slot
    shape: Shape
    place: Place
    direct: bool  # is it a function of unchanged inputs?


_Choices = Callable[[Shape], Sequence[Layout]]  # the layouts that fit a shape
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
        # What does not depend on samples: the module's own tensors, and what was computed from them; by id.
        self._shared = {id(t) for t in [*own, *others]}
        self._weights: set[int] = set()  # those made of trainable weights alone
        self._alive: list[weakref.ref[Tensor]] = []
        self._steps: list[Step] = []
        self._meetings: list[_Meeting] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or len(self._steps) >= _MOST:
            return func(*args, **kwargs)
        if self._has_data(args) or (kwargs and self._has_data(kwargs.values())):
            return self._of_data(func, args, kwargs)
        result = func(*args, **kwargs)
        if type(result) is Tensor:
            first = args[0] if args else None
            if not isinstance(first, Tensor) or self._is_shared(first):  # no activation
                self._share(result, args, kwargs)
        return result

    def _has_data(self, values: Iterable[Any]) -> bool:
        numbers = self._numbers
        return any(id(v) in numbers or (isinstance(v, (list, tuple)) and self._has_data(v)) for v in values)

    def _share(self, result: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if all(self._is_shared(t) for t in tensors) and not any(result is t for t in tensors):
            self._shared.add(id(result))
            if tensors and all(self.is_weight(t) for t in tensors):
                self._weights.add(id(result))
            self._watch(result)

    def _of_data(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = [_version(t) for t in given]
        active = any(self._is_active(t) for t in given)
        result = func(*args, **kwargs)
        changes = tuple(i for i, t in enumerate(given) if _version(t) != before[i])
        returned = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        outputs = returned + [given[i] for i in changes]
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
        key, numbers, others = id(t), self._numbers, (self._shared, self._weights)

        def forget(_: object) -> None:
            numbers.pop(key, None)
            for ids in others:
                ids.discard(key)

        self._alive.append(weakref.ref(t, forget))

    def is_weight(self, t: Tensor) -> bool:
        """Is it a weight, or computed from weights alone?"""
        return isinstance(t, ExpandedWeight) or id(t) in self._weights

    def _is_active(self, t: Tensor) -> bool:
        """Is it a weight, or computed from weights and whatever else?"""
        return isinstance(t, ExpandedWeight) or (t.requires_grad and id(t) not in self._numbers)

    def _is_shared(self, t: Tensor) -> bool:
        """Is it a weight, of the module, a small constant, or computed from such alone?"""
        small = not t.requires_grad and t.numel() <= _SMALL
        return isinstance(t, ExpandedWeight) or id(t) in self._shared or small

    def _can_be_replaced(self, t: Tensor) -> bool:
        """Data are given again, constants are kept, and other numbers are replaced by noise; indices cannot be."""
        return id(t) in self._numbers or self._is_shared(t) or t.is_floating_point() or t.is_complex()

    def _replaced(self, leaf: Any, changed: bool) -> Any:
        """An argument as it is noted."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._numbers:
            return Made(self._numbers[id(leaf)])
        if changed or not self._is_shared(leaf):
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

    def found(self, choices: Callable[[Shape], Sequence[Layout]], known: Collection[Slot]) -> dict[Slot, Verdict]:
        """What running again shows of results of data and weights; those of unchanged inputs may be known already."""
        found, replay = {}, Replay(self._steps, self._sources, self._batch)
        for meeting in self._meetings:
            if meeting.direct and meeting.slot in known:
                continue
            key = self._signature(replay, meeting)
            verdict = None if key is None else _FOUND.get(key)
            if verdict is None:
                verdict = _judged(replay, meeting.place, choices)
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
        if id(leaf) not in self._own and not leaf.requires_grad and leaf.numel() <= _SMALL:
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


def _judged(replay: Replay, place: Place, choices: _Choices) -> Verdict:
    """What the pattern of one result says."""

    def fits(pattern: Tensor) -> bool:
        return bool(fitting(pattern, choices(tuple(pattern.shape)), replay.batch))

    seen = replay.shown(place, fits)
    if seen is None:
        return Verdict()
    way, pattern = seen
    if not choices(tuple(pattern.shape)):  # a mean over samples, say, to which data may contribute that are apart
        return _judged_by_data(replay, place, way)
    if fits(pattern):
        found = fitting(pattern, choices(tuple(pattern.shape)), replay.batch)
        return Verdict(found[0] if len(found) == 1 else None)
    if not replay.is_deterministic(place, way) or _is_by_coincidence(replay, place, fits):
        return Verdict()
    interact = depends_on_several(pattern, replay.batch)
    return Verdict(None if interact else decoded(pattern, replay.batch), _culprits(replay, place, way, fits), interact)


def _judged_by_data(replay: Replay, place: Place, way: Way) -> Verdict:
    """What data say that went into a result which has no batch."""
    step = replay.steps[place[0]]
    makers = {number: (i, k) for i, s in enumerate(replay.steps[: place[0]]) for k, number in enumerate(s.numbers)}
    given = [makers[number] for number in step.uses() if number in makers]
    try:
        patterns = replay.patterns(given, way) if given else {}
    except Unfit:
        return Verdict()
    meet = [made for made, pattern in patterns.items() if depends_on_several(pattern, replay.batch)]
    return Verdict(None, _culprits(replay, meet[0], way, lambda pattern: True), interact=True) if meet else Verdict()


def _is_by_coincidence(replay: Replay, place: Place, fits: Callable[[Tensor], bool]) -> bool:
    """Do inputs disagree of which each keeps samples apart? Then some is a table that is as long as the batch."""
    alone = [replay.shown(place, fits, only=number) for number in range(len(replay.sources))]
    return len(alone) > 1 and all(seen is None or fits(seen[1]) for seen in alone)


def _culprits(replay: Replay, place: Place, way: Way, fits: Callable[[Tensor], bool]) -> str:
    """Of the functions that lead to a result, the first in which samples meet, and the first that moves them."""
    before = [(i, k) for i in replay.needed(place) if i != place[0] for k in range(len(replay.steps[i].numbers))]
    try:
        patterns = replay.patterns(before, way) if before else {}
    except Unfit:
        patterns = {}
    meet = [i for (i, _), pattern in patterns.items() if depends_on_several(pattern, replay.batch)]
    moved = [i for (i, _), p in patterns.items() if len(p[p != 0].unique()) > 1 and not fits(p)]
    first = sorted({*sorted(meet)[:1], *sorted(moved)[:1]}) or [place[0]]
    return ", ".join(name_of(replay.steps[i].func) for i in first)
