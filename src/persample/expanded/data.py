"""Functions of data, noted from the inputs of a call to where they meet weights, or what was computed from weights.

They leave no trace in the graph. When a backward wants to know where a tensor carries its samples, and whether it keeps
them apart, they are run again with some samples changed (`replay`). Notes name what they were made from by number and
hold no data, so that nothing lives longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..graph.layout import Layout, Shape
from ..graph.read.nodes import NodeSlot
from ..graph.read.roots import slot_of
from ..graph.read.saved import version
from ..trees import leaves, tree_map
from .origins import SMALL, Origin, Origins
from .replay import Made, Noise, Place, Replay, Source, Step
from .samples import Finding
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
    place: Place
    direct: bool  # is it a function of unchanged inputs?


_ANSWERS: dict[Any, Finding] = {}  # for functions and shapes that were seen before


class Notes(TorchFunctionMode):
    """Notes functions of the call's inputs, up to where they meet weights."""

    def __init__(self, sources: Sequence[Source], batch: int, dim: int, module: nn.Module, others: Iterable[Tensor]):
        super().__init__()
        self._sources, self._batch, self._dim = sources, batch, dim
        self._numbers = {id(source.tensor): number for number, source in enumerate(sources)}  # of data that live, by id
        self._next = len(sources)
        self._own = {id(t): t for t in [*module.parameters(), *module.buffers()]}
        self.origins = Origins(self._own.values(), others)
        self._alive: list[weakref.ref[Tensor]] = []
        self._steps: list[Step] = []
        self._meetings: list[_Meeting] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or len(self._steps) >= _MOST:
            self.origins.lose_track()
            return func(*args, **kwargs)
        if self._has_data(args) or (kwargs and self._has_data(kwargs.values())):
            return self._call(func, args, kwargs)
        return self.origins.call(func, args, kwargs)

    def _has_data(self, values: Iterable[Any]) -> bool:
        numbers = self._numbers
        return any(id(v) in numbers or (isinstance(v, (list, tuple)) and self._has_data(v)) for v in values)

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of data, and note it."""
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = [_version(t) for t in given]
        active = any(map(self._is_active, given))
        result = func(*args, **kwargs)
        returned = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        changes = tuple(i for i, t in enumerate(given) if _version(t) != before[i])
        changed = [given[i] for i in changes]
        self.origins.meet_data(func, changed)
        if not all(map(self._can_be_noted, given)) or _has_offsets(func, args, kwargs):
            self._forget(returned + changed)
        elif returned or changed:
            self._note(func, args, kwargs, given, returned, changes, active)
        return result

    def _note(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        returned: list[Tensor],
        changes: tuple[int, ...],
        active: bool,
    ) -> None:
        """Note a call by the tensors that it was ``given``, those it ``returned``, and which of the former it changed.

        ``active``: a weight, or what was computed from weights, was among those given.
        """
        changed, by_shape = {id(given[i]) for i in changes}, self._by_shape(func, given)
        args, kwargs = tree_map(lambda leaf: self._noted(leaf, id(leaf) in changed), (args, kwargs))
        untouched = self._is_untouched(given) and not changes
        if kwargs.get("out") is not None:  # made anew by every run
            kwargs, changes = {**kwargs, "out": None}, ()
            self._forget(returned)
        outputs = returned + [given[i] for i in changes]
        same = [any(t is g for g in given) and id(t) not in changed for t in outputs]
        numbers = self._outputs(outputs, same, active, untouched)
        self._steps.append(Step(func, args, kwargs, numbers, changes, by_shape))

    def _outputs(
        self, outputs: Sequence[Tensor], same: Sequence[bool], active: bool, untouched: bool
    ) -> tuple[int | None, ...]:
        """Numbers for those that are data, and new; results of data and weights are where both meet."""
        numbers: list[int | None] = []
        for k, t in enumerate(outputs):
            meets = active and t.requires_grad and t.grad_fn is not None
            numbers.append(None if same[k] or meets else self._number(t))
            if meets and not same[k]:
                self._meetings.append(_Meeting(slot_of(t), (len(self._steps), k), untouched))
        return tuple(numbers)

    def _is_untouched(self, given: Sequence[Tensor]) -> bool:
        """Are all data among these inputs of the call, as they were?"""
        inputs = all(self._numbers.get(id(t), 0) < len(self._sources) for t in given)
        return inputs and not any(step.changes for step in self._steps)

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        """These tensors no longer hold data that can be computed again."""
        for t in tensors:
            self._numbers.pop(id(t), None)

    def _number(self, t: Tensor) -> int:
        """The number of a tensor of data; a new one, if it has none. It is forgotten when the tensor dies."""
        key, numbers = id(t), self._numbers
        if key not in numbers:
            numbers[key] = self._next
            self._next += 1
            self._alive.append(weakref.ref(t, lambda _: numbers.pop(key, None)))
        return numbers[key]

    def _is_active(self, t: Tensor) -> bool:
        """Is it a weight, or computed from weights and whatever else?"""
        return isinstance(t, ExpandedWeight) or (t.requires_grad and id(t) not in self._numbers)

    def _can_be_noted(self, t: Tensor) -> bool:
        """Data are given again, constants are kept, and other numbers are replaced by noise; indices cannot be."""
        is_number = t.is_floating_point() or t.is_complex()
        return is_number or id(t) in self._numbers or self.origins.of(t) > Origin.UNKNOWN

    def _noted(self, leaf: Any, changed: bool) -> Any:
        """An argument as it is noted."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._numbers:
            return Made(self._numbers[id(leaf)])
        if changed or self.origins.of(leaf) == Origin.UNKNOWN:
            return Noise(leaf)
        return ExpandedWeight.unwrap(leaf)

    def _by_shape(self, func: Callable[..., Any], given: Sequence[Tensor]) -> bool:
        """Do shapes alone decide where this function leaves the samples?"""
        alone = len(given) == 1 and _plain_name(func) == "getitem"
        integers = any(id(t) in self._numbers and not (t.is_floating_point() or t.is_complex()) for t in given)
        return alone or not integers or _plain_name(func) in _BY_SHAPE

    def evidence(
        self, choices: Callable[[Shape], Sequence[Layout]], known: Mapping[NodeSlot, Finding]
    ) -> dict[NodeSlot, Finding]:
        """What running again shows of results of data and weights; those of unchanged inputs may be known already."""
        evidence, replay = {}, Replay(self._steps, self._sources, self._batch, choices)
        for meeting in self._meetings:
            if meeting.direct and meeting.slot in known:
                continue
            key = self._signature(replay, meeting)
            answer = _ANSWERS.get(key) or replay.locate(meeting.place)
            evidence[meeting.slot] = answer
            if key is not None:
                _ANSWERS[key] = answer
        while len(_ANSWERS) > _KEPT:
            _ANSWERS.pop(next(iter(_ANSWERS)))
        return evidence

    def _signature(self, replay: Replay, meeting: _Meeting) -> tuple[Any, ...] | None:
        """Functions and shapes, if the same ones always leave samples in the same place."""
        parts: list[Any] = [self._batch, self._dim, meeting.place[1]]
        parts += [(tuple(s.tensor.shape), s.tensor.dtype, s.tensor.stride()) for s in self._sources]
        for i in replay.needed(meeting.place):
            step = self._steps[i]
            arguments = leaves((step.args, tuple(step.kwargs.items())))
            noted = [self._compared(leaf, _plain_name(step.func) in _BY_SHAPE) for leaf in arguments]
            if not step.by_shape or None in noted:
                return None
            parts += [step.func, step.numbers, *noted]
        return tuple(parts)

    def _compared(self, leaf: Any, by_shape: bool) -> Any:
        """What counts of an argument; None if more than can be compared."""
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        weight = leaf.is_floating_point() and (leaf.requires_grad or id(leaf) in self._own)
        if not weight and leaf.numel() <= SMALL:
            return tuple(leaf.shape), leaf.dtype, tuple(leaf.detach().flatten().tolist())
        return (tuple(leaf.shape), leaf.dtype) if by_shape or weight else None


def _version(t: Tensor) -> int:
    """How often it was changed in place; weights are not, and tensors made for inference do not say."""
    return 0 if isinstance(t, ExpandedWeight) or t.is_inference() else version(t)


def _has_offsets(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Bags end where the next sample's begin, so that their offsets are no data of one sample."""
    return _plain_name(func) == "embedding_bag" and (args[2] if len(args) > 2 else kwargs.get("offsets")) is not None


def _plain_name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "").strip("_")
