"""What can be found out about the samples of a call, and what is to be said if it contradicts itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .._errors import UnsupportedError
from ..graph.layout import Layout, Shape
from ..graph.nodes import NodeSlot
from ..graph.roots import Roots


class UnknownBatch(UnsupportedError):
    """The samples cannot be told apart in what a call returned."""


class Disagreement(Exception):
    """A reading of the results contradicts what is known inside; ``op`` is the function that moved samples, if any.

    ``unproven`` if nothing contradicts it, but nothing confirms it either.
    """

    def __init__(self, op: str | None = None, unproven: bool = False) -> None:
        super().__init__(op)
        self.op, self.unproven = op, unproven


class Verdict(NamedTuple):
    """Where a result of data carries its samples, as far as can be seen."""

    layout: Layout | None = None
    op: str | None = None  # the function that put samples elsewhere than in a dim of their own, or made them interact
    interact: bool = False
    pooled: bool = False  # does it hold several samples, and no batch? Then none of them may use all of it


class Data(Protocol):
    """Data that were computed from the inputs of a call, and met weights."""

    def found(
        self, choices: Callable[[Shape], Sequence[Layout]], known: Collection[NodeSlot]
    ) -> dict[NodeSlot, Verdict]:
        """Results of data and weights, but those of unchanged inputs that are known."""

    def tables(self) -> Sequence[NodeSlot]:
        """What was computed from weights, and from constants that no input went into."""


@dataclass(frozen=True)
class Reading:
    """One way to read the results: where to start a backward, and whether this is what was promised."""

    roots: Roots
    promised: Sequence[bool]  # of every root
    usual: bool  # is every batch where it would be expected?
    returned: bool  # does it start from the results themselves?
