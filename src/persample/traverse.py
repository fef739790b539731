"""The order of a graph: the one traversal from which all others are made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)

Below = Callable[[T], Iterable[T]]  # the nodes that a node leads to directly


def ordered(starts: Iterable[T], below: Below[T]) -> list[T]:
    """All nodes that ``starts`` lead to, and these: every node before those below it. Without recursion."""
    children_first: list[T] = []
    seen: set[T] = set()
    stack: list[tuple[T, bool]] = [(start, False) for start in starts]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            children_first.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child in below(node) if child not in seen]
    children_first.reverse()
    return children_first


def leading_to(starts: Iterable[T], goals: Collection[T], below: Below[T]) -> set[T]:
    """All nodes below ``starts``, and these, from which one of ``goals`` is reached by at least one edge."""
    leading: set[T] = set()
    for node in reversed(ordered(starts, below)):
        if any(child in goals or child in leading for child in below(node)):
            leading.add(node)
    return leading
