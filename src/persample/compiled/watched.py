"""What a build depends on that Dynamo does not watch over: the parameters that were asked for, and the reductions.

Dynamo guards all that the losses' function reads. It knows nothing of parameters that the losses do not reach, of
settings of a reduction (a bound, groups), or of what a user's function from norms to weights reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.read.saved import has_hooks
from ..modules import attributes_of, held_by, is_usual
from ..params import Params, named
from ..reductions import Reduction

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_NUMBERS = (bool, int, float, complex)
_FIXED = (type, ModuleType, BuiltinFunctionType)  # what nobody changes
_MOST_ITEMS = 64  # of a list or dict that a function reads, to be compared one by one


class Watched:
    """Parameters as they are when this is made."""

    def __init__(self, params: Params) -> None:
        self._params, self.named = params, named(params)
        self._modules = list(params.modules()) if isinstance(params, nn.Module) else []
        self._is_usual = bool(self._modules) and all(map(is_usual, self._modules))
        self._held = held_by(self._modules)
        self._tensors = list(params.parameters()) if isinstance(params, nn.Module) else []
        self._trained = [t.requires_grad for t in self._tensors]

    def are_the_same(self) -> bool:
        """Would `named` give the same parameters, by the same names and without complaint? In a tenth of its time."""
        if not self._is_usual:
            now = named(self._params)
            return list(now) == list(self.named) and all(now[name] is p for name, p in self.named.items())
        return (
            held_by(self._modules) == self._held
            and [t.requires_grad for t in self._tensors] == self._trained
            and not any(map(has_hooks, self._tensors))
        )


def kinds_of(reductions: Sequence[Reduction]) -> list[Any]:
    """All settings of reductions, but for the numbers of tensors that they are made with: of these, the kind."""
    return [(type(r), [(key, _kind(value, key == "per")) for key, value in vars(r).items()]) for r in reductions]


def _kind(value: Any, is_group: bool) -> Any:
    """What equals the kind of a later value if a graph that was made for one is right for the other."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (Tensor, nn.Module)) and is_group:  # stands for parameters
        return _Same(value)
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    parts = named(value).items() if isinstance(value, nn.Module) else _items(value)
    if parts is None:
        return _state(value, frozenset(), set())
    return type(value), [(key, _kind(part, is_group)) for key, part in parts]


def _items(value: Any) -> Any:
    """What a list, tuple, mapping or dataclass holds; None for anything else."""
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    if is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in fields(value)]
    return None


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal to itself alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def _state(value: Any, names: frozenset[str], seen: set[Any]) -> Any:
    """A function or another object, and all that it reads which may be another number, or another object, next time.

    ``names`` are those that occur in the functions that read it: of an object, attributes of these names matter. The
    numbers in tensors do not: a graph reads them when it runs.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    names |= _names_in(value, names)
    if isinstance(value, (*_FIXED, Tensor)) or (id(value), names) in seen:
        return _Same(value)
    seen.add((id(value), names))
    items = list(_items(value) or ())
    parts = items if 0 < len(items) <= _MOST_ITEMS else _variables(value, names)
    return _Same(value), [(key, _state(part, names, seen)) for key, part in parts]


def _names_in(value: Any, names: frozenset[str]) -> frozenset[str]:
    """The names that a function reads, or the methods of an object that have one of these names or make it callable."""
    if isinstance(value, (FunctionType, MethodType)):
        return _names_of(value.__code__)
    methods = {name: getattr(type(value), name, None) for name in ("__call__", *names)}
    found = names.union(*(_names_of(fn.__code__) for fn in methods.values() if isinstance(fn, FunctionType)))
    return found if found == names else _names_in(value, found)


def _names_of(code: CodeType) -> frozenset[str]:
    inner = [_names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inner)


def _variables(value: Any, names: frozenset[str]) -> list[tuple[Any, Any]]:
    """What a function reads from outside, and the attributes of other objects that have one of these names."""
    if isinstance(value, MethodType):
        return [("function", value.__func__), ("self", value.__self__)]
    if isinstance(value, partial):
        return [("function", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, FunctionType):
        closed = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        outside = [(name, value.__globals__[name]) for name in sorted(names) if name in value.__globals__]
        defaults = [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return [*((name, _content(cell)) for name, cell in closed), *outside, *defaults]
    return [(name, getattr(value, name)) for name in sorted(names) if name in _readable(value)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _readable(value: Any) -> set[str]:
    """The names of what can be read of an object without running anything: what it holds, and numbers of its class."""
    shared = {name for kind in type(value).__mro__ for name, v in vars(kind).items() if isinstance(v, _NUMBERS)}
    return shared | attributes_of(value)
