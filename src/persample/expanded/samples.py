"""Where the samples lie in the results of a call.

An output says it by its shape: the batch is a dim of size B, or lies folded in a dim of size B·T. Where several dims
fit, the right one is the one that agrees with what is known inside: the result of a layer that was given one of the
call's inputs carries its samples where the input does. An output without a batch (a mean loss) is followed down
to the tensors that have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.utils.rnn import PackedSequence

from ..graph.layout import Block, Labels, Layout, Shape, join, strides
from ..graph.plan import Plan
from ..graph.roots import Roots, slot_of
from ..graph.site import Flow, weights_only
from ..graph.tape import Slot, walk

_TRIES = 64  # ways to read several outputs that each leave a choice


class UnknownBatch(RuntimeError):
    """The samples cannot be told apart in what a call returned."""


class Disagreement(Exception):
    """A guess at the outputs contradicts what is known inside."""


@dataclass(slots=True)
class Samples:
    """What is known of the samples of one call."""

    batch: int
    dim: int  # of the batch, in inputs and outputs
    known: dict[Slot, Layout] = field(default_factory=dict)
    inputs: Sequence[Tensor] = ()  # of the call, those with a batch
    packed: PackedSequence | None = None  # the call's one packed input, if it has one

    def knows(self, tensor: Tensor) -> bool:
        """Has it been told where this tensor's samples lie?"""
        return slot_of(tensor) in self.known

    def tell(self, tensor: Tensor, layout: Layout) -> None:
        """The samples of this tensor lie so."""
        if tensor.requires_grad:
            self.known[slot_of(tensor)] = layout

    def tell_dim(self, tensor: Tensor, dim: int) -> None:
        """The samples of this tensor lie in one dim, if it has the size of the batch."""
        if tensor.ndim > dim and tensor.shape[dim] == self.batch:
            self.tell(tensor, along(tensor.shape, dim, self.batch))

    def of_input(self, t: Tensor) -> Layout | None:
        """Where the samples lie in one of the call's inputs, or in a view of it."""
        for x in self.inputs if self.batch > 1 else ():
            if t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.is_contiguous():
                continue
            step, apart = x.stride(self.dim), t.storage_offset() - x.storage_offset()
            if t.is_contiguous() and t.numel() == x.numel() and not apart:
                return along(x.shape, self.dim, self.batch)  # a reshape leaves it as it is
            dims = [d for d in range(t.ndim) if (t.shape[d], t.stride(d)) == (self.batch, step)]
            if len(dims) == 1 and t.numel() and apart // step % self.batch == 0:
                return along(t.shape, dims[0], self.batch)
        return None

    def choices(self, shape: Shape) -> list[Layout]:
        """All places in which the samples may lie, the likeliest first."""
        dims = sorted(range(len(shape)), key=lambda d: (d != self.dim, d))
        exact: list[Layout] = [along(shape, d, self.batch) for d in dims if shape[d] == self.batch]
        folded: list[Layout] = []
        for d in range(len(shape)):
            if shape[d] > self.batch and shape[d] % self.batch == 0:
                both = [along(shape, d, self.batch), Block(self.batch, strides(tuple(shape))[d])]
                folded += both if self.dim == 0 else both[::-1]
        return exact + folded

    def starts(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor], weights: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Iterator[Roots]:
        """Every way to start a backward from these outputs, the likeliest first."""
        found: list[tuple[Slot, Tensor, list[Layout]]] = []
        without: list[tuple[Slot, Tensor]] = []
        for output, g in zip(outputs, grads, strict=True):
            slot, choices = slot_of(output), self._places(slot_of(output), tuple(output.shape))
            if choices:
                found.append((slot, g, choices))
            else:
                without.append((slot, g))
        if without:
            found += self._below(without, weights, inputs)
        slots, cotangents = [slot for slot, _, _ in found], [g for _, g, _ in found]
        for layouts in islice(product(*[choices for _, _, choices in found]), _TRIES):
            yield Roots(slots, layouts, self.batch, cotangents)

    def _places(self, slot: Slot, shape: Shape) -> list[Layout]:
        if slot in self.known:
            return [self.known[slot]]
        return self.choices(shape)

    def _below(
        self, without: Sequence[tuple[Slot, Tensor]], weights: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[tuple[Slot, Tensor, list[Layout]]]:
        """The nearest tensors below that have a batch, with their cotangents."""
        tape = walk([node for (node, _), _ in without], [*weights, *inputs])
        data = {slot_of(x)[0] for x in inputs}
        found: dict[Slot, list[Layout]] = {}
        stack = [slot[0] for slot, _ in without if slot[0] in tape.edges]
        seen = set(stack)
        while stack:
            node = stack.pop()
            for slot in tape.edges[node]:
                if slot is None or slot in found:
                    continue
                if weights_only(tape, slot[0]) and not tape.reaches(slot[0], data.__contains__):
                    raise UnknownBatch(
                        f"an output of the call has no batch of {self.batch} samples, and below it parameters are used "
                        f"without any sample ({type(node).__name__}), as in a penalty on weights: whose gradient that "
                        f"is cannot be known. Return one loss per sample, and add such terms outside"
                    )
                places = self._places(slot, tape.shape(slot))
                if places:
                    found[slot] = places
                elif slot[0] not in seen:
                    seen.add(slot[0])
                    stack.append(slot[0])
        if not found:
            return []
        tops, edges = [GradientEdge(*slot) for slot, _ in without], [GradientEdge(*slot) for slot in found]
        grads = torch.autograd.grad(tops, edges, [g for _, g in without], retain_graph=True, allow_unused=True)
        return [(slot, g, found[slot]) for slot, g in zip(found, grads, strict=True) if g is not None]

    def verify(self, plan: Plan) -> None:
        """Refuse a reading of the outputs that contradicts what is known inside."""
        shared = agreed = 0
        for slot, layout in self.known.items():
            state = plan.map.cotangents.get(slot)
            if state is Flow.SHARED:
                shared += 1
            elif state is not None:
                if isinstance(state, Flow) or join(state, layout, plan.tape.shape(slot)) is None:
                    raise Disagreement
                agreed += 1
        if shared and not agreed:  # a tensor that looks like a batch may be shared, but not all of them
            raise Disagreement


def along(shape: Sequence[int], dim: int, batch: int) -> Block:
    """The samples are dim ``dim``, or its outer part where it is larger than the batch."""
    step = strides(tuple(shape))[dim]
    return Block(batch, step * max(shape[dim] // batch, 1)) if batch else Block(0, step)


def of_packed(batch_sizes: Tensor, order: Tensor | None, data: Tensor, batch: int) -> Layout:
    """The samples of a packed sequence: at every step the first so many of ``order``."""
    order = torch.arange(batch, device="cpu") if order is None else order.cpu()
    index = torch.cat([order[:n] for n in batch_sizes.tolist()])
    return Labels(batch, index.reshape([-1, *[1] * (data.ndim - 1)]))
