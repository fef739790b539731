"""The table of rules, and what a rule gets to see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps

from torch import Tensor

from ...factors import Factor
from ..lanes import Lanes
from ..layout import Layout, Shape
from ..registry import Undecided, or_else, registrar
from ..site import Site


@dataclass(slots=True)
class Use:
    """Backward output ``k`` of a separable node, whose cotangents have been captured whole."""

    site: Site
    k: int
    cotangents: Sequence[Tensor | None]
    layouts: Sequence[Layout | None]
    batch: int

    @property
    def g(self) -> Tensor:
        """The cotangent of the first output."""
        found = self.cotangents[0]
        if found is None:
            raise Undecided
        return found

    @property
    def layout(self) -> Layout:
        """Where the samples lie in ``g``."""
        found = self.layouts[0]
        if found is None:
            raise Undecided
        return found

    @property
    def target(self) -> Shape:
        """The shape of the tensor whose gradient this is."""
        return self.site.target(self.k)

    def lanes(self, row_dims: int) -> Lanes | None:
        """The first dims of ``g`` as rows that belong to samples."""
        return Lanes.of(self.layout, tuple(self.g.shape), row_dims)


Rule = Callable[[Use], Factor | None]

RULES: dict[str, Rule] = {}


_enter = registrar(RULES, "rule")


def rule(names: str, *, several: bool = False) -> Callable[[Rule], Rule]:
    """Enter a rule for these node types; where it is `Undecided`, the exact fallback serves.

    It is asked only where the first cotangent is the one in use, unless it looks at ``several``.
    """

    def enter(function: Rule) -> Rule:
        return _enter(names)(or_else(None, function if several else of_first(function)))

    return enter


def of_first(function: Rule) -> Rule:
    """A rule that knows nothing as soon as other cotangents than the first have come."""

    @wraps(function)
    def asked(use: Use) -> Factor | None:
        return None if any(g is not None for g in use.cotangents[1:]) else function(use)

    return asked
