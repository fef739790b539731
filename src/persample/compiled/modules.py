"""What modules hold, read from where they keep it: their own methods take ten times as long.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/compiled/test_modules.py`` checks
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import nn


def is_usual(module: nn.Module) -> bool:
    """Are the parameters of a module those that it holds, and its modules do?"""
    ways = "named_parameters", "named_modules"
    return all(getattr(type(module), way) is getattr(nn.Module, way) for way in ways)


def held_by(modules: Sequence[nn.Module]) -> tuple[list[int], list[str], list[int]]:
    """How many parameters and modules each of these holds, the names of all, and their identities."""
    held = [*map(attrgetter("_parameters"), modules), *map(attrgetter("_modules"), modules)]
    identities = map(id, chain.from_iterable(map(dict.values, held)))
    return list(map(len, held)), list(chain.from_iterable(held)), list(identities)


def own(module: nn.Module) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The parameters and the modules that a module holds itself, by name; there may be None among them."""
    return module._parameters, module._modules


def attributes_of(value: Any) -> set[str]:
    """The names of what an object holds itself; of a module, that includes parameters, buffers and modules."""
    held = getattr(value, "__dict__", {})
    inside = (held.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules"))
    return set(held).union(*inside) if isinstance(value, nn.Module) else set(held)
