"""What modules hold, read from where they keep it: their own methods take ten times as long.

The names used here are private to PyTorch. They hold for torch 2.13 to 2.15; ``tests/test_modules.py`` checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn


def is_usual(module: nn.Module) -> bool:
    """Are the parameters of a module those that it holds, and its modules do?"""
    ways = "named_parameters", "named_modules"
    return all(getattr(type(module), way) is getattr(nn.Module, way) for way in ways)


def held_by(modules: Sequence[nn.Module]) -> tuple[list[int], list[str], list[int]]:
    """How many parameters and modules each of these holds, the names of all, and their identities."""
    held = [*map(attrgetter("_parameters"), modules), *map(attrgetter("_modules"), modules)]
    identities = map(id, chain.from_iterable(map(dict.values, held)))
    return list(map(len, held)), list(chain.from_iterable(held)), list(identities)


def attributes_of(value: Any) -> set[str]:
    """The names of what an object holds itself; of a module, that includes parameters, buffers and modules."""
    held = getattr(value, "__dict__", {})
    inside = (held.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules"))
    return set(held).union(*inside) if isinstance(value, nn.Module) else set(held)


class Census:
    """Knows a model's parameters by name, and asks all modules again when one, a parameter or a name has changed.

    It keeps nothing alive: a model may be gone, or a parameter replaced by another one in its place.
    """

    def __init__(self) -> None:
        self._modules: list[ref[nn.Module]] = []  # all that there are; none if one has its own way to name parameters
        self._held: object = None  # what they hold
        self._named: list[tuple[str, ref[Tensor]]] = []

    def of(self, model: nn.Module) -> dict[str, Tensor]:
        """All parameters that the model has now, each once, as ``named_parameters`` gives them."""
        modules = [module for known in self._modules if (module := known()) is not None]
        if modules and modules[0] is model and len(modules) == len(self._modules) and held_by(modules) == self._held:
            named = {name: p for name, known in self._named if (p := known()) is not None}
            if len(named) == len(self._named):
                return named
        return self._again(model)

    def _again(self, model: nn.Module) -> dict[str, Tensor]:
        named, modules = dict[str, Tensor](model.named_parameters()), list(model.modules())
        usual = all(map(is_usual, {type(module): module for module in modules}.values()))
        self._modules = [ref(module) for module in modules] if usual else []
        self._held, self._named = held_by(modules), [(name, ref(p)) for name, p in named.items()]
        return named


_CENSUSES: WeakKeyDictionary[nn.Module, Census] = WeakKeyDictionary()


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """``dict(model.named_parameters())``, in a fraction of the time for a model that was asked for before."""
    if type(model).__hash__ is not object.__hash__:  # so that models may be equal that are not the same
        return dict(model.named_parameters())
    census = _CENSUSES.get(model)
    if census is None:
        census = _CENSUSES[model] = Census()
    return census.of(model)
