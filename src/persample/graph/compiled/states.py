"""What is known of a tensor in the backward graph of a compiled region."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...factors import Factor
from ..layout import Layout
from ..read.compiled import Unreadable


class NoFactor(Exception):
    """A rule of the table has found nothing for the tensors of this call."""


class Computed:
    """What nodes of the graph have computed in one call; ``stacks`` are what was made of it for several factors."""

    def __init__(self, values: Mapping[fx.Node, Any]) -> None:
        self._values = values
        self.stacks: dict[fx.Node, Any] = {}

    def __call__(self, node: fx.Node) -> Any:
        return self._values[node]


@dataclass(frozen=True, slots=True)
class Separable:
    """Every element is one sample's."""

    layout: Layout


@dataclass(frozen=True, slots=True)
class Summed:
    """A sum over samples: ``build`` makes its factor from what the nodes that it ``needs`` have computed."""

    needs: tuple[fx.Node, ...]
    build: Callable[[Computed], Factor]
    terms: tuple[Summed, ...] = ()  # of a plain sum, as of all uses of one weight
    depth: int = 0  # calls between the sum over samples and this


State = Separable | Summed | None  # None: it does not depend on cotangents
States = State | tuple[State, ...]


def unknown(node: fx.Node) -> Unreadable:
    """No rule is known for this call."""
    return Unreadable(f"{node.target} on tensors {[shape_of(n) for n in node.all_input_nodes]}")


def value_of(node: fx.Node) -> Any:
    """The shape and dtype of what a node of the graph computes."""
    return node.meta["val"]


def shape_of(node: fx.Node) -> Any:
    """The shape of what a node computes, if that is one tensor."""
    found = value_of(node)
    return tuple(found.shape) if hasattr(found, "shape") else None


def one_shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node that computes one tensor."""
    return tuple(value_of(node).shape)
