"""Where a backward starts: slots of the graph, their cotangents, and which sample every element belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .layout import Block, Layout
from .saved import metadata
from .tape import Slot


@dataclass(frozen=True, slots=True)
class Roots:
    """One or several places to start from.

    ``losses`` is set when the one place is a vector of losses, whose cotangent is ones.
    """

    slots: Sequence[Slot]
    layouts: Sequence[Layout]
    batch: int
    cotangents: Sequence[Tensor] = ()
    losses: Tensor | None = None

    @classmethod
    def of_losses(cls, losses: Tensor) -> Roots:
        """One loss per sample."""
        return cls([slot_of(losses)], [Block(len(losses), 1)], len(losses), losses=losses)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        node, nr = self.slots[0]
        return int(metadata(node)[nr].dtype.itemsize)

    def backward(self, inputs: Sequence[Slot], *, retain_graph: bool) -> tuple[Tensor | None, ...]:
        """The gradients of the whole batch at ``inputs``."""
        if self.losses is None:
            return self.pull(self.cotangents, inputs, retain_graph=retain_graph)
        with torch.enable_grad():
            total = self.losses.sum()  # a cotangent of ones, without the imports that a given one costs once
        return torch.autograd.grad(total, _edges(inputs), retain_graph=retain_graph, allow_unused=True)

    def passing(
        self, nodes: Sequence[Node], edges: Mapping[Node, Sequence[Slot | None]]
    ) -> dict[Node, list[Tensor | None]]:
        """The cotangents that come to ``nodes``, copied as they do: somebody may change them later on."""
        found: dict[Node, list[Tensor | None]] = {node: [None] * len(metadata(node)) for node in nodes}

        def keep(node: Node, grads: Sequence[Tensor | None]) -> None:
            found[node] = [None if g is None else g.clone() for g in grads]

        handles = [node.register_prehook(partial(keep, node)) for node in nodes]
        below = dict.fromkeys(slot for node in nodes for slot in edges[node] if slot is not None)
        try:
            self.backward(list(below), retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def pull(
        self, cotangents: Sequence[Tensor], inputs: Sequence[Slot], *, retain_graph: bool
    ) -> tuple[Tensor | None, ...]:
        """The same from other cotangents."""
        starts = _edges(self.slots)
        return torch.autograd.grad(starts, _edges(inputs), cotangents, retain_graph=retain_graph, allow_unused=True)


def slot_of(tensor: Tensor) -> Slot:
    """Where a tensor's gradient arrives in its graph."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _edges(slots: Sequence[Slot]) -> list[GradientEdge]:
    return [GradientEdge(node, nr) for node, nr in slots]
