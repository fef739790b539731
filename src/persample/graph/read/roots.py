"""Where a backward starts: slots of the graph, their cotangents, and which sample every element belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ...distributed.tensor_parallel import wholes
from ...kernels.differentiable import is_differentiable
from ...numberless import has_numbers
from ..layout import Block, Layout
from .nodes import NodeSlot
from .regions import Regions
from .saved import metadata
from .tape import Graph, Tape, read


@dataclass(frozen=True, slots=True)
class Roots:
    """One or several places to start from.

    ``losses`` is set when the one place is a vector of losses, whose cotangent is ones.
    """

    slots: Sequence[NodeSlot]
    layouts: Sequence[Layout]
    batch: int
    cotangents: Sequence[Tensor] = ()
    losses: Tensor | None = None
    regions: Regions = field(init=False)  # what reentrant checkpoints hide of the graph below

    def __post_init__(self) -> None:
        object.__setattr__(self, "regions", Regions([node for node, _ in self.slots]))

    @classmethod
    def of_losses(cls, losses: Tensor) -> Roots:
        """One loss per sample."""
        return cls([slot_of(losses)], [Block(len(losses), 1)], len(losses), losses=losses)

    @classmethod
    def of_position(cls, losses: Tensor, position: int) -> Roots:
        """The losses of all samples at one of their positions, counted through all dims of (B, K…) but the first."""
        count = losses[0].numel()
        one_hot = torch.zeros(len(losses), count, dtype=losses.dtype, device=losses.device)
        one_hot[:, position] = 1
        return cls([slot_of(losses)], [Block(len(losses), count)], len(losses), [one_hot.view(losses.shape)])

    @property
    def has_numbers(self) -> bool:
        """Is there data to be looked at?"""
        starts = self.cotangents if self.losses is None else [self.losses]
        return all(has_numbers(t) for t in starts)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        node, nr = self.slots[0]
        return int(metadata(node)[nr].dtype.itemsize)

    @property
    def places(self) -> list[tuple[NodeSlot, Layout]]:
        """The slots as they are in the graph whose reentrant checkpoints are opened."""
        places = []
        for slot, layout in zip(self.slots, self.layouts, strict=True):
            node, nr = self.regions.resolve(*slot)
            places += [] if node is None else [((node, nr), layout)]
        return places

    def read(self) -> Graph:
        """The graph below."""
        return read([node for (node, _), _ in self.places], self.regions)

    def tape(self, params: Iterable[Tensor], graph: Graph | None = None) -> Tape:
        """The part of the graph that leads to these leaves."""
        params = list(params)
        graph = graph or self.read()
        self.regions.refuse_taken(params)
        return graph.tape(params)

    def backward(self, inputs: Sequence[NodeSlot], *, retain_graph: bool) -> tuple[Tensor | None, ...]:
        """The gradients of the whole batch at ``inputs``."""
        if self.losses is None or self.regions.opened or self.losses.device.type != "cpu":
            cotangents = [g.clone() for g in self.cotangents] or [torch.ones_like(self.losses)]  # type: ignore[arg-type]
            return self.pull(cotangents, inputs, retain_graph=retain_graph)
        with torch.enable_grad():
            # A cotangent of ones, in memory of its own as the definition's is, which a custom Function may write to;
            # and without the imports that a given one costs once. On other devices it would cost three launches.
            total = self.losses.dot(torch.ones_like(self.losses))
        return _gradients([total], inputs, None, retain_graph)

    def passing(self, nodes: Sequence[Node], below: Sequence[NodeSlot]) -> dict[Node, list[Tensor | None]]:
        """The cotangents that come to ``nodes`` on the way to ``below``, copied as they do: others may change them."""
        arrived: dict[Node, list[Tensor | None]] = {node: [None] * len(metadata(node)) for node in nodes}

        def keep(node: Node, grads: Sequence[Tensor | None]) -> None:
            arrived[node] = [None if g is None else g.clone() for g in wholes(grads)]

        handles = [node.register_prehook(partial(keep, node)) for node in nodes]
        try:
            self.backward(below, retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        return arrived

    def pull(
        self, cotangents: Sequence[Tensor], inputs: Sequence[NodeSlot], *, retain_graph: bool
    ) -> tuple[Tensor | None, ...]:
        """The gradients at ``inputs``, from cotangents of the caller's."""
        if self.regions.opened:
            starts = list(zip(self.slots, cotangents, strict=True))
            return tuple(wholes(self.regions.backward(starts, inputs, retain_graph=retain_graph)))
        return _gradients(_edges(self.slots), inputs, cotangents, retain_graph)


def slot_of(tensor: Tensor) -> NodeSlot:
    """Where a tensor's gradient arrives in its graph."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _gradients(
    outputs: Sequence[Tensor] | Sequence[GradientEdge],
    inputs: Sequence[NodeSlot],
    cotangents: Sequence[Tensor] | None,
    retain_graph: bool,
) -> tuple[Tensor | None, ...]:
    """Those at ``inputs``, with a graph of their own if results are to be differentiated again."""
    create_graph = is_differentiable()
    found = torch.autograd.grad(
        outputs, _edges(inputs), cotangents, retain_graph or create_graph, create_graph, allow_unused=True
    )
    return tuple(wholes(found))


def _edges(slots: Sequence[NodeSlot]) -> list[GradientEdge]:
    return [GradientEdge(node, nr) for node, nr in slots]
