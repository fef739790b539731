"""The cotangents of nodes that the engine passes or stops at, kept until it is done.

Hooks and custom Functions may change a cotangent in place, and an op may have handed the same memory to several others
(the two operands of a sum). What the engine passes is copied at first, and watched; if nobody has changed any in one
backward, it is taken as it is in the next ones, in which a change is refused. What the engine stops at can only be
looked at when all is over: it is watched from the moment it is made, before anybody else can see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ..._errors import UnsupportedError
from ...distributed.tensor_parallel import wholes
from ...kernels.streams import Streams
from ..read.saved import is_custom, memory, version
from ..read.tape import Graph, Slot


@dataclass(slots=True)
class Watch:
    """What one backward has shown to the next ones like it."""

    quiet: bool = False  # all cotangents stayed as they were


class Gathering:
    """One backward's cotangents of some nodes, by their places."""

    def __init__(self, nodes: Sequence[Node], watch: Watch) -> None:
        self._nodes, self._watch = nodes, watch
        self._copying = not watch.quiet
        self._arrived: dict[int, tuple[Tensor, int]] = {}  # cotangents, with their versions when they came
        self._copies: dict[int, Tensor] = {}

    def hook(self, streams: Streams) -> list[RemovableHandle]:
        """Keep the cotangent of every node when the engine comes to it; the handles remove the hooks."""
        arrive = streams.noting(self._arrive)
        return [node.register_prehook(partial(arrive, i)) for i, node in enumerate(self._nodes)]

    def _arrive(self, place: int, grads: Sequence[Tensor | None]) -> None:
        (g,) = wholes(grads[:1])
        if g is not None:
            self._arrived[place] = g, version(g)
            if self._copying:
                self._copies[place] = g.clone()

    def end(self) -> dict[int, Tensor]:
        """The cotangents that the engine brought, in the order of their places."""
        changed = [g for g, before in self._arrived.values() if version(g) != before]
        if self._copying:
            self._watch.quiet = not changed
        elif changed:
            raise changed_in_place(changed[0])
        kept = self._copies if self._copying else {place: g for place, (g, _) in self._arrived.items()}
        return dict(sorted(kept.items()))


def changed_in_place(t: Tensor) -> UnsupportedError:
    """What to raise when others have changed what factors are made of."""
    return UnsupportedError(
        f"a cotangent or a saved tensor of shape {tuple(t.shape)} was changed in place during the backward, by a hook "
        f"or a custom Function: let it work on a copy"
    )


Source = tuple[int, int, Slot]  # a node, one of its outputs, and the slot at which the engine stops that it goes to


class Births:
    """Watches the cotangents that the engine will return, from when they are made."""

    def __init__(self, sources: Sequence[Source], graph: Graph) -> None:
        self._nodes = graph.nodes
        self._outputs: dict[int, list[tuple[int, Slot]]] = {}
        for node, k, slot in sources:
            self._outputs.setdefault(node, []).append((k, slot))
        self._made: dict[Slot, list[tuple[int, int] | None]] = {}  # memory and version; None: nobody else has it

    def hook(self) -> list[RemovableHandle]:
        """Look at what comes out of every node that feeds them."""
        return [self._nodes[number].register_hook(partial(self._look, number)) for number in self._outputs]

    def _look(self, number: int, outputs: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> None:
        for k, slot in self._outputs[number]:
            g = outputs[k]
            if g is not None:
                others = [*inputs, *outputs[:k], *outputs[k + 1 :]]
                custom = is_custom(self._nodes[number])
                shared = custom or any(t is not None and memory(t) == memory(g) for t in others)
                self._made.setdefault(slot, []).append((memory(g), version(g)) if shared else None)

    def check(self, returned: Mapping[Slot, Tensor]) -> None:
        """Raise if one that others could see was changed; the sum of several is the engine's own."""
        for slot, g in returned.items():
            made = self._made.get(slot, ())
            if len(made) == 1 and made[0] is not None:
                place, then = made[0]
                if memory(g) == place and version(g) != then:
                    raise changed_in_place(g)
