"""What registered rules contribute to a weight's gradient while a backward runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.autograd.graph import Node

from ..factors import Factor

_LISTENING: dict[Node, list[Factor]] = {}  # by the node of the weight's leaf, which belongs to one call


@contextmanager
def contributions(leaves: Sequence[Node]) -> Iterator[dict[Node, list[Factor]]]:
    """Collect what rules contribute to these leaves meanwhile."""
    found: dict[Node, list[Factor]] = {leaf: [] for leaf in leaves}
    _LISTENING.update(found)
    try:
        yield found
    finally:
        for leaf in leaves:
            _LISTENING.pop(leaf, None)


def contribute(leaf: Node, factor: Factor) -> None:
    """A part of a weight's factor; nobody listens while the engine only passes by, or asks where samples lie."""
    found = _LISTENING.get(leaf)
    if found is not None:
        found.append(factor)
