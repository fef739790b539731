"""The parameters of a model by name, without asking every module for its name at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_

from torch import Tensor, nn

from ..compiled.modules import is_usual, own
from ..distributed import owners


class Census:
    """Knows a model's parameters, and counts again when a module, a parameter or a name has changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []  # all that there are; none if one has its own way to name parameters
        self._held: list[object] = []  # what they hold
        self._named: dict[str, Tensor] = {}

    def named(self) -> Mapping[str, Tensor]:
        """All parameters that the model has now, each once: the same object as before, if nothing has changed."""
        held = _held_by(self._modules)
        if not held or len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._named, self._modules = dict(self._model.named_parameters()), list(self._model.modules())
            self._held = _held_by(self._modules)
        return owners(self._named)


def _held_by(modules: Sequence[nn.Module]) -> list[object]:
    """Parameters and modules that these hold, with their names; nothing if one has its own way to name them.

    Where all modules of a model hold what they held before, there are no others. What is found is held on to: another
    object cannot come to lie in its place.
    """
    found: list[object] = []
    for module in modules:
        parameters, children = own(module)
        if parameters:
            found.append(module)
            found += parameters
            found += parameters.values()
        if children:
            found.append(module)
            found += children
            found += children.values()
    return found if all(map(is_usual, {type(module): module for module in modules}.values())) else []
