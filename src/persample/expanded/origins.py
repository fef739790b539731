"""Where tensors of a recorded call come from that are no data: weights, constants, and what is computed from these."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any

from torch import Tensor

from ..graph.read.nodes import NodeSlot
from ..graph.read.roots import slot_of
from ..trees import leaves
from .functions import is_in_place
from .weight import ExpandedWeight

SMALL = 1024  # elements of a constant of unknown origin, as a mean or a scale
# Ways out of tensors, by which data may come back as constants; shapes and truth values are no data.
_ESCAPES = frozenset("item tolist numpy __array__ __int__ __float__ __complex__ __index__ __dlpack__".split())


class Origin(IntEnum):
    """What a tensor is made of. A function's result is of the least of what it is given."""

    UNKNOWN = 0  # activations, and constants from elsewhere
    SAME_FOR_ALL = 1  # of the samples, as far as is likely: small constants, and arguments without a batch
    NO_DATA = 2  # for certain: the module's own tensors, and what the call makes of nothing (a range, zeros)
    WEIGHTS = 3  # and nothing else


class Origins:
    """The origins of tensors, by id, as long as they live."""

    def __init__(self, own: Iterable[Tensor], others: Iterable[Tensor]) -> None:
        self._own = {id(t): t for t in own}
        self._others = {id(t) for t in others}
        self._made: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}
        self._tables: list[NodeSlot] = []
        self._lost = False  # has anything happened that was not seen?

    def of(self, t: Tensor) -> Origin:
        """The origin of a tensor that is no data."""
        if isinstance(t, ExpandedWeight):
            return Origin.WEIGHTS
        if id(t) in self._own:
            return Origin.NO_DATA
        if id(t) in self._made:
            return self._made[id(t)][1]
        small = not t.requires_grad and t.numel() <= SMALL
        return Origin.SAME_FOR_ALL if small or id(t) in self._others else Origin.UNKNOWN

    def tables(self) -> list[NodeSlot]:
        """What was computed from weights, and from constants to which no data have contributed."""
        return [] if self._lost else self._tables

    def lose_track(self) -> None:
        """Something happens that is not seen."""
        self._lost = True

    def meet_data(self, func: Callable[..., Any], changed: Iterable[Tensor]) -> None:
        """Data go into a function, and into what it changes."""
        self._lost = self._lost or _name(func) in _ESCAPES
        self._taint(*changed)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that is given no data."""
        result = func(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and not self.of(args[0]):  # an activation: most functions are such
            self._lost = self._lost or _name(func) in _ESCAPES
            if kwargs.get("out") is not None:
                self._taint(*leaves(kwargs["out"]))
            return result
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        origin = min(map(self.of, given), default=Origin.NO_DATA)
        if origin < Origin.NO_DATA:
            self._lost = self._lost or _name(func) in _ESCAPES
            if _writes(func, kwargs):
                self._taint(*given)
        for made in leaves(result):
            if type(made) is Tensor and not any(made is t for t in given):
                # One part of a weight may be repeated for every sample, and returned: not to be refused as a weight.
                self._enter(made, origin if made is result else min(origin, Origin.NO_DATA))
        return result

    def _enter(self, made: Tensor, origin: Origin) -> None:
        key, table = id(made), self._made
        table[key] = weakref.ref(made, lambda _: table.pop(key, None)), origin
        if origin >= Origin.NO_DATA and made.grad_fn is not None:
            self._tables.append(slot_of(made))

    def _taint(self, *tensors: Tensor) -> None:
        """They may hold data now, and all that lies in the same memory."""
        places = {_memory(t) for t in tensors if not isinstance(t, ExpandedWeight)}
        if not places:
            return
        self._lost = self._lost or None in places
        for key in [key for key, t in self._own.items() if _memory(t) in places]:
            self._others.add(key)
            del self._own[key]
        for key, (ref, origin) in list(self._made.items()):
            t = ref()
            if t is not None and _memory(t) in places:
                self._made[key] = ref, min(origin, Origin.SAME_FOR_ALL)


def _memory(t: Tensor) -> int | None:
    """Where a tensor is kept; None if that cannot be said."""
    try:
        return t.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):  # sparse tensors and those of transforms have no memory of their own
        return None


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "")


def _writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """May it change a tensor?"""
    return kwargs.get("out") is not None or is_in_place(func)
