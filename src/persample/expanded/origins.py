"""Where tensors come from that are no data: weights, what else belongs to the module, and what is made of these."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..graph.nodes import NodeSlot
from ..graph.roots import slot_of
from ..trees import leaves
from .weight import ExpandedWeight

SMALL = 1024  # elements of a constant of unknown origin, as a mean or a scale
# Ways out of tensors, by which data may come back as constants; shapes and truth values are no data.
_ESCAPES = frozenset("item tolist numpy __array__ __int__ __float__ __complex__ __index__ __dlpack__".split())

_HOLD_TENSORS = (Tensor, tuple, list)


class Origins:
    """What tensors are made of, by id, as long as they live.

    *Shared* ones do not depend on samples, as far as is likely: the module's own, small constants, and what is computed
    from such alone. Of some of them it is certain, so that they are *nobody's*: the module's own, what the call makes
    of nothing (a range, zeros), and what is computed from such alone.
    """

    def __init__(self, own: Sequence[Tensor], others: Iterable[Tensor]) -> None:
        self._own = own
        self._shared = {id(t) for t in [*own, *others]}
        self._weights: set[int] = set()  # those made of trainable weights alone
        self._nobodys: dict[int, int | None] = {id(t): None for t in own}  # and where they are kept, if it is known
        self._tables: list[NodeSlot] = []
        self._lost = False
        self._alive: list[weakref.ref[Tensor]] = []

    def is_weight(self, t: Tensor) -> bool:
        """Is it a weight, or computed from weights alone?"""
        return isinstance(t, ExpandedWeight) or id(t) in self._weights

    def is_shared(self, t: Tensor) -> bool:
        """Is it a weight, of the module, a small constant, or computed from such alone?"""
        small = not t.requires_grad and t.numel() <= SMALL
        return isinstance(t, ExpandedWeight) or id(t) in self._shared or small

    def _is_nobodys(self, t: Tensor) -> bool:
        return isinstance(t, ExpandedWeight) or id(t) in self._nobodys

    def tables(self) -> Sequence[NodeSlot]:
        """What was computed from weights and nobody's constants, if all that happened was seen."""
        return () if self._lost else self._tables

    def lose_track(self) -> None:
        """Something happens that is not seen."""
        self._lost = True

    def meet_data(self, func: Callable[..., Any], changed: Iterable[Tensor]) -> None:
        """Data go into a function, and into what it changes."""
        self._lost = self._lost or _name(func) in _ESCAPES
        for t in changed:
            self._taint(t)

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that is given no data."""
        result, first = func(*args, **kwargs), args[0] if args else None
        if not isinstance(first, Tensor) or self.is_shared(first):  # no activation
            if result is None or isinstance(result, _HOLD_TENSORS) or _name(func) in _ESCAPES:
                self._follow(func, args, kwargs, result)
        elif _name(func) in _ESCAPES:
            self._lost = True
        elif kwargs.get("out") is not None:
            self._taint(*leaves(kwargs["out"]))
        return result

    def _follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        nobodys = all(map(self._is_nobodys, given))
        if not nobodys:
            self._lost = self._lost or _name(func) in _ESCAPES
            if _writes(func, kwargs):
                self._taint(*given)
        for made in leaves(result):
            if type(made) is Tensor and not any(made is t for t in given):
                self._share(made, given, nobodys, single=made is result)

    def _share(self, result: Tensor, given: Sequence[Tensor], nobodys: bool, single: bool) -> None:
        if single and all(map(self.is_shared, given)):
            self._shared.add(id(result))
        if single and given and all(map(self.is_weight, given)):
            self._weights.add(id(result))
        if nobodys:
            self._nobodys[id(result)] = _memory(result)
            self._tables += [slot_of(result)] if result.grad_fn is not None else []
        self._watch(result)

    def _taint(self, *tensors: Tensor) -> None:
        """They may hold data now, and all that lies in the same memory."""
        places = {_memory(t) for t in tensors if not isinstance(t, ExpandedWeight)}
        self._lost = self._lost or None in places
        for t in tensors:
            self._nobodys.pop(id(t), None)
        if places and self._own:
            self._nobodys.update({id(t): _memory(t) for t in self._own})
            self._own = ()
        for key in [key for key, place in self._nobodys.items() if place in places]:
            del self._nobodys[key]

    def _watch(self, t: Tensor) -> None:
        """Forget a tensor's id when it dies."""
        key, sets, nobodys = id(t), (self._shared, self._weights), self._nobodys

        def forget(_: object) -> None:
            for ids in sets:
                ids.discard(key)
            nobodys.pop(key, None)

        self._alive.append(weakref.ref(t, forget))


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
    name = _name(func)
    return (
        kwargs.get("out") is not None
        or name in ("__setitem__", "__set__")
        or bool(re.fullmatch(r"__i[a-z]+__|[a-z]\w*[a-z0-9]_", name))
    )
