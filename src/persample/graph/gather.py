"""The cotangents of nodes that the engine passes, kept until it is done.

The engine returns them for nothing, but as the tensors that they are, which hooks and custom Functions may change in
place before anybody has looked. So they are copied by hooks at first, and watched; what nobody has changed in one
backward, the engine is asked for in the next ones, and it is seen afterwards that it is still unchanged. Sums of
several contributions are always copied: the engine itself may make them in place.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from .._errors import UnsupportedError
from .saved import version
from .tape import Slot


@dataclass(slots=True)
class Watch:
    """What one backward has shown to the next ones like it."""

    single: Set[int]  # the places of nodes whose cotangents are one contribution
    unchanged: Set[int] | None = None  # those of them that stayed as they were made


class Gathering:
    """One backward's cotangents of some nodes, by their places."""

    def __init__(self, nodes: Sequence[Node], watch: Watch) -> None:
        self._nodes, self._watch = nodes, watch
        self._found: dict[int, Tensor] = {}
        self._watched: dict[int, Tensor] = {}
        self._returned = sorted(watch.unchanged or ())

    @property
    def requested(self) -> list[Slot]:
        """What the engine is to return."""
        return [(self._nodes[i], 0) for i in self._returned]

    def hook(self) -> list[RemovableHandle]:
        """Copy all others as they come by."""
        returned = set(self._returned)
        others = [(i, node) for i, node in enumerate(self._nodes) if i not in returned]
        return [node.register_prehook(partial(self._arrive, i)) for i, node in others]

    def _arrive(self, place: int, grads: Sequence[Tensor | None]) -> None:
        g = grads[0]
        if g is not None:
            self._found[place] = g.clone()
            if self._watch.unchanged is None and place in self._watch.single:
                self._watched[place] = g

    def end(self, returned: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """All that have come, in their order, when the engine has ``returned`` what was requested."""
        if self._watch.unchanged is None:
            self._watch.unchanged = {i for i, g in self._watched.items() if is_as_made(g)}
        for place, g in zip(self._returned, returned, strict=True):
            if g is not None:
                if not is_as_made(g):
                    raise UnsupportedError(
                        f"a cotangent of shape {tuple(g.shape)} was changed in place during the backward, by a hook or "
                        f"a custom Function: let it work on a copy"
                    )
                self._found[place] = g
        return dict(sorted(self._found.items()))


def is_as_made(g: Tensor) -> bool:
    """Has nobody changed a tensor in place since there is one?"""
    return not g.is_inference() and not version(g)
