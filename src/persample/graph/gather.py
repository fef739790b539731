"""The cotangents of nodes that the engine passes, kept until it is done.

Hooks and custom Functions may change a cotangent in place when its node has seen it. So cotangents are copied at first,
and watched; if nobody has changed any in one backward, they are taken as they are in the next ones, in which a change
is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from .._errors import UnsupportedError
from .saved import version


@dataclass(slots=True)
class Watch:
    """What one backward has shown to the next ones like it."""

    quiet: bool = False  # all cotangents stayed as they were


class Gathering:
    """One backward's cotangents of some nodes, by their places."""

    def __init__(self, nodes: Sequence[Node], watch: Watch) -> None:
        self._nodes, self._watch = nodes, watch
        self._copying = not watch.quiet
        self._came: dict[int, tuple[Tensor, int]] = {}  # with their versions
        self._copies: dict[int, Tensor] = {}

    def hook(self) -> list[RemovableHandle]:
        """Take what comes by."""
        return [node.register_prehook(partial(self._arrive, i)) for i, node in enumerate(self._nodes)]

    def _arrive(self, place: int, grads: Sequence[Tensor | None]) -> None:
        g = grads[0]
        if g is not None:
            self._came[place] = g, version(g)
            if self._copying:
                self._copies[place] = g.clone()

    def end(self) -> dict[int, Tensor]:
        """All that have come, in the order of their places."""
        changed = [g for g, before in self._came.values() if version(g) != before]
        if self._copying:
            self._watch.quiet = not changed
        elif changed:
            raise UnsupportedError(
                f"a cotangent of shape {tuple(changed[0].shape)} was changed in place during the backward, by a hook "
                f"or a custom Function: let it work on a copy"
            )
        found = self._copies if self._copying else {place: g for place, (g, _) in self._came.items()}
        return dict(sorted(found.items()))
