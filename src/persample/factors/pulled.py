"""Gradients behind ops that keep no structure: written out when they are asked for, a few samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..kernels.devices import can_look
from ..kernels.norms import row_norms, wide, widest
from .base import Factor, Selection, Shape
from .integer_sums import IntegerSum, StackSum
from .limits import Unit
from .stacks import real_rows
from .workspace import Workspace

# From a way to write out the n gradients of an origin, by its place, to (n, *shape).
Through = Callable[[Callable[[int], Tensor]], Tensor]


class Pulled(Factor):
    """What linear ops make of the gradients of some ``origins``, of which alone anything is kept.

    Args:
        origins: gradients before these ops, in whatever form they have.
        through: calls the ops.
        shape: of one gradient after them.
        dtype: of the gradients.
        each: how many bytes are needed at once for one sample.
        room: how many bytes may be.
        sums_pass: may a sum of gradients go through the ops in place of each of them? Not if they may be other than
            linear, or if they round a sum more coarsely than it is kept.
    """

    __slots__ = ("_dtype", "_shape", "each", "origins", "room", "sums_pass", "through")

    def __init__(
        self,
        origins: Sequence[Factor],
        through: Through,
        shape: Shape,
        dtype: torch.dtype,
        *,
        each: int,
        room: int,
        sums_pass: bool,
    ) -> None:
        self.origins, self.through, self._shape, self._dtype = origins, through, shape, dtype
        self.each, self.room, self.sums_pass = each, room, sums_pass

    @property
    def batch(self) -> int:
        return self.origins[0].batch

    @property
    def shape(self) -> Shape:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for origin in self.origins for t in origin.tensors)

    @property
    def at_a_time(self) -> int:
        """How many samples there is room for."""
        return max(1, min(self.batch, self.room // max(self.each, 1)))

    def _like_this(self, origins: Sequence[Factor], *, alone: bool = False) -> Pulled:
        room, sums_pass = (0, False) if alone else (self.room, self.sums_pass)
        return Pulled(origins, self.through, self._shape, self._dtype, each=self.each, room=room, sums_pass=sums_pass)

    def __getitem__(self, samples: Selection) -> Pulled:
        return self._like_this([origin[samples] for origin in self.origins])

    def _written(self, some: slice) -> Tensor:
        """(n, *shape): the gradients of some samples, at once."""
        return self.through(lambda place: self.origins[place][some].stack())

    def stacks(self, space: Workspace) -> Iterator[tuple[slice, Tensor]]:
        for some in space.chunks(self.batch, self.each, most=self.at_a_time):
            yield some, self._written(some)

    def stack(self, out: Tensor | None = None) -> Tensor:
        if out is None:
            if 0 < self.batch <= self.at_a_time:
                return self._written(slice(0, self.batch))
            out = torch.empty(self.batch, *self.shape, dtype=self.dtype, device=self.device)
        for some, stack in self.stacks(Workspace.on(self.device, self.room)):
            out[some] = stack
        return out

    def add_to(self, out: Tensor) -> None:
        for some, stack in self.stacks(Workspace.on(self.device, self.room)):
            out[some] += stack

    def _compute_norms(self, space: Workspace) -> Tensor:
        """(B,): into one tensor, as small ones that stay would take room that large ones need again and again."""
        norms = torch.empty(self.batch, dtype=widest(self.device), device=self.device)
        for some, stack in self.stacks(space):
            norms[some] = row_norms(stack)
        return norms

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        """The ops are called once, with the weighted sums of what comes to them."""
        if not self.sums_pass or not self.batch:
            return super().weighted_sum(weights, space)

        def summed(place: int) -> Tensor:
            origin = self.origins[place]
            return origin.weighted_sum(weights.to(origin.device), space).to(origin.dtype).unsqueeze(0)

        return self.through(summed).squeeze(0)

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        """Half of the memory holds the gradients of some samples, the other half those of the others in turn.

        With itself, those of samples before are left out, as their inner products are known.
        """
        limit = (space or Workspace()).limit
        halves = Workspace(limit // 2, limit // 2), Workspace(limit // 2)
        dtype = wide(self.dtype).to_real()
        products = torch.empty(self.batch, other.batch, dtype=dtype, device=self.device)
        for mine in halves[0].chunks(self.batch, self.numel * self.dtype.itemsize):
            rows = real_rows(self[mine].stack())
            first = mine.start if other is self else 0
            for theirs, stack in other[first:].stacks(halves[1]):
                block = products[mine, first + theirs.start : first + theirs.stop]
                torch.mm(rows, real_rows(stack).to(dtype).t(), out=block)
        if other is self:
            products = products.triu() + products.triu(1).t()
        return products

    # Sums of gradients that are never written out: rounding may show in them.

    @property
    def may_cancel(self) -> bool:
        return self.sums_pass

    def term_norms(self) -> Tensor:
        """The norms of the terms of the origins, times by how much the ops make gradients larger, as far as is seen."""
        norms = self.cached_norms()
        if not self.sums_pass:
            return norms
        terms = torch.stack([origin.term_norms() for origin in self.origins]).sum(0)
        gains = (norms / terms).nan_to_num(nan=0.0, posinf=0.0)
        return torch.maximum(norms, terms * gains.amax()) if len(gains) else norms

    def cancelling_samples(self, space: Workspace | None = None) -> Tensor:
        """Those whose terms cancel in an origin, and those of which the ops leave little of large terms."""
        if not self.may_cancel or not can_look(self.device):
            return super().cancelling_samples(space)
        if not hasattr(self, "_cancelling"):
            of_origins = [origin.cancelling_samples(space) for origin in self.origins if origin.may_cancel]
            self._cancelling = torch.cat([super().cancelling_samples(space), *of_origins]).unique()
        return self._cancelling

    def rounding_errors(self) -> Tensor:
        """None: the gradients are what is written out."""
        return torch.zeros_like(self.cached_norms())

    # How a sample is rounded in sums of whole numbers must not depend on others: each goes through the ops alone.

    def cache_batch_independent_norms(self, space: Workspace) -> None:
        if not self.has_norms and self.batch and self.numel:
            alone = self._like_this(self.origins, alone=True)
            self._norms = alone._compute_norms(space)

    def integer_sum(self, unit: Unit, space: Workspace) -> IntegerSum:
        self.cache_batch_independent_norms(space)
        alone = self._like_this(self.origins, alone=True)
        alone.set_norms(self.cached_norms(space))
        return StackSum(alone, unit, space)
