"""The parameters of a model by name, without asking every module for its name at every step."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_

from torch import Tensor, nn

from ..compiled.modules import is_usual, own
from ..distributed import owners


class Census:
    """Knows a model's parameters, and counts again when a module, a parameter or a name has changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: list[object] = []
        self._named: dict[str, Tensor] = {}

    def named(self) -> Mapping[str, Tensor]:
        """All parameters that the model has now, each once: the same object as before, if nothing has changed."""
        seen = _seen(self._model)
        if seen is None or len(seen) != len(self._seen) or not all(map(is_, seen, self._seen)):
            self._named, self._seen = dict(self._model.named_parameters()), seen or []
        return owners(self._named)


def _seen(model: nn.Module) -> list[object] | None:
    """Modules and parameters with their names, in a fixed order; None if a module has its own way to name them.

    What is seen is held on to: another object cannot come to lie in its place.
    """
    found: list[object] = []
    waiting, known = [model], set[int]()
    while waiting:
        module = waiting.pop()
        if id(module) in known:
            continue
        if not is_usual(module):
            return None
        known.add(id(module))
        parameters, modules = own(module)
        if parameters:
            found += parameters.keys()
            found += parameters.values()
        if modules:
            found += modules.keys()
            children = [child for child in modules.values() if child is not None]
            found += children
            waiting += children
    return found
