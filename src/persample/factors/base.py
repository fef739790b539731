"""`Factor`: the gradients of B samples with respect to one tensor, in some structured form.

A factor has a batch size, a shape and the tensors it is made from, can write its gradients out (`stack`) and can select
samples (`__getitem__`). Everything else has a default here, which writes out a few samples at a time; a form that has
a shorter way overrides it. Inner products are real: a complex gradient counts as the vector of its real and imaginary
parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from ..kernels.differentiable import is_differentiable
from ..kernels.norms import row_norms, wide, widest
from .integer_sums import IntegerSum, StackSum
from .limits import Unit, norm_error, roundoff
from .moments import Sides, moments_from_stacks, squares_from_stacks
from .norms import norms_from_stacks
from .precise import precise_stacks
from .stacks import real_rows, squares
from .workspace import Workspace

Shape = tuple[int, ...]
Selection = slice | Tensor  # a range, or the indices of some samples


class Factor(ABC):
    """The gradients of B samples with respect to one tensor of a given ``shape``."""

    __slots__ = ("_cancelling", "_norms")
    _norms: Tensor  # (B,), once they are computed
    _cancelling: Tensor  # indices of samples whose terms cancel or may cancel, once they are known

    # What every factor defines.

    @property
    @abstractmethod
    def batch(self) -> int:
        """B."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The shape of one sample's gradient."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the gradients are made from; the first has their dtype."""

    @abstractmethod
    def stack(self, out: Tensor | None = None) -> Tensor:
        """(B, *shape): every gradient, written into ``out`` if it is given."""

    @abstractmethod
    def __getitem__(self, samples: Selection) -> Factor:
        """A factor of some of the samples."""

    # What follows from these for every form.

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""
        return self.tensors[0].device

    @property
    def numel(self) -> int:
        """Elements of one sample's gradient."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How much memory the factor keeps alive."""
        return sum([t.nbytes for t in self.tensors])

    @property
    def stack_bytes(self) -> int:
        """The size of `stack()`."""
        return self.batch * self.numel * self.dtype.itemsize

    # What reductions ask for.

    def stacks(self, space: Workspace) -> Iterator[tuple[slice, Tensor]]:
        """The gradients of a few samples at a time: only to be read, and before ``space`` is used for anything else."""
        for some in space.chunks(self.batch, self.numel * self.dtype.itemsize):
            buffer = space.buffer((some.stop - some.start, *self.shape), self.dtype, self.device)
            chunk = self if some.stop - some.start == self.batch else self[some]
            yield some, chunk.stack(buffer)

    def norms(self, space: Workspace | None = None) -> Tensor:
        """(B,): the norm of every gradient, in float64 (computed once)."""
        return self.cached_norms(space).clone()

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        """(*shape): Σ_b weights[b] · gradient[b], in float32 or wider."""
        total = torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        into = real_rows(total.unsqueeze(0))
        for some, stack in self.stacks(space or Workspace()):
            rows = real_rows(stack)
            into.addmm_(weights[some].to(rows.dtype).unsqueeze(0), rows)
        return total

    def sum_squares(self, center: Tensor | None = None, space: Workspace | None = None) -> Tensor:
        """(*shape): Σ_b |gradient[b]|², in float32 or wider; with a ``center`` near the mean, of deviations from it.

        The center only has to be near: Σ|g - mean|² = Σ|g - c|² - |Σ(g - c)|² / B for any c.
        """
        dtype = wide(self.dtype)
        total = torch.zeros(self.shape, dtype=dtype.to_real(), device=self.device)
        deviation = torch.zeros(self.shape, dtype=dtype, device=self.device) if center is not None else None
        for _, stack in self.stacks(space or Workspace()):
            rows = stack.to(dtype)
            if center is not None and deviation is not None:
                rows = rows - center.to(dtype)
                deviation += rows.sum(0)
            total += squares(rows).sum(0)
        return total if deviation is None else total.sub_(squares(deviation) / max(self.batch, 1)).clamp_(min=0)

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        """(B, k): the inner product of every gradient with each of ``directions`` (k, *shape)."""
        columns = real_rows(directions.to(wide(self.dtype))).t()
        products = [real_rows(stack) @ columns for _, stack in self.stacks(space or Workspace())]
        return torch.cat(products) if products else columns.new_zeros(0, len(directions))

    def dot_and_sum(self, direction: Tensor, weights: Tensor, space: Workspace | None = None) -> tuple[Tensor, Tensor]:
        """(B,) and (*shape): `dot` with one direction, and `weighted_sum`."""
        return self.dot(direction.unsqueeze(0), space).squeeze(1), self.weighted_sum(weights, space)

    def _dot_and_sum_of_stacks(
        self, direction: Tensor, weights: Tensor, space: Workspace | None
    ) -> tuple[Tensor, Tensor]:
        """`dot_and_sum` of gradients that are written out once for both."""
        total = torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        into, products = real_rows(total.unsqueeze(0)), []
        column = real_rows(direction.to(total.dtype).unsqueeze(0)).squeeze(0)
        for some, stack in self.stacks(space or Workspace()):
            rows = real_rows(stack)
            products.append(rows @ column)
            into.addmm_(weights[some].to(rows.dtype).unsqueeze(0), rows)
        return torch.cat(products) if products else column.new_zeros(0), total

    def sides_of_sum(self, weights: Tensor) -> tuple[Tensor, Tensor] | None:
        """Matrices (r, n) and (r, m) whose product leftᵀ · right is `weighted_sum`, if they cost less than it does."""
        return None

    def dot_product(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        """(B,): the inner product of every gradient with leftᵀ · right, for left (r, n) and right (r, m)."""
        return self.dot((left.t() @ right).view(1, *self.shape), space).squeeze(1)

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        """(B, B'): the inner product of every gradient with each of another factor's."""
        space = space or Workspace()
        dtype = wide(self.dtype).to_real()
        if is_differentiable():
            return real_rows(self.stack()) @ real_rows(other.stack()).to(dtype).t()
        products = torch.empty(self.batch, other.batch, dtype=dtype, device=self.device)
        if self.stack_bytes > space.limit and self._gram_by_elements(other, space, products):
            return products
        for mine, stack in self.stacks(space.up_to_limit()):
            rows = real_rows(stack)
            for theirs, other_stack in other.stacks(space):
                torch.mm(rows, real_rows(other_stack).to(dtype).t(), out=products[mine, theirs])
        return products

    def _gram_by_elements(self, other: Factor, space: Workspace, out: Tensor) -> bool:
        """`gram` of all samples at once, a range of elements at a time; False if a factor has no `elements`."""
        out.zero_()
        both = self.batch + other.batch
        for some in space.chunks(self.numel, both * out.dtype.itemsize, least=self.numel // both):
            mine, theirs = (f.elements(some.start, some.stop) for f in (self, other))
            if mine is None or theirs is None:
                return False
            out.addmm_(mine.to(out.dtype), theirs.to(out.dtype).t())
        return True

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        """(B, k, l): leftᵀ · gradient · right for left (n, k) and right (m, l), gradients seen as n x m matrices."""
        n, m = len(left), len(right)
        left, right = (t.to(wide(self.dtype).to_real()) for t in (left, right))
        compressed = [
            torch.matmul(left.t(), real_rows(stack).view(len(stack), n, m) @ right)
            for _, stack in self.stacks(space or Workspace())
        ]
        return torch.cat(compressed) if compressed else left.new_zeros(0, left.shape[1], right.shape[1])

    def moments(self, left: bool, right: bool, space: Workspace | None = None) -> Sides:
        """Σ_b G_b G_bᵀ (n, n) and Σ_b G_bᵀ G_b (m, m), each if wanted, of gradients seen as n x m matrices."""
        return moments_from_stacks(self, left, right, space or Workspace())

    def left_moment(self, space: Workspace | None = None) -> Tensor:
        """(n, n): the first of `moments`."""
        moment = self.moments(True, False, space)[0]
        assert moment is not None
        return moment

    def right_moment(self, space: Workspace | None = None) -> Tensor:
        """(m, m): the second of `moments`."""
        moment = self.moments(False, True, space)[1]
        assert moment is not None
        return moment

    def rotated_squares(self, left: Tensor | None, right: Tensor | None, space: Workspace | None = None) -> Tensor:
        """(k, l): Σ_b (leftᵀ G_b right)² for left (n, k) and right (m, l); None stands for the identity."""
        return squares_from_stacks(self, left, right, space or Workspace())

    # Shorter ways that a form may have.

    def prefers_stack(self, reused: bool) -> bool:
        """Is writing the gradients out the fastest way to their norms, or to norms and sums if it is ``reused``?"""
        return True

    def add_to(self, out: Tensor) -> None:
        """Add `stack()` to ``out``."""
        out += self.stack()

    def elements(self, start: int, stop: int) -> Tensor | None:
        """(B, stop - start): a range of every flattened gradient; None if that costs as much as all of it."""
        return None

    def weighted_sums_of_parts(self, count: int, weights: Tensor, space: Workspace) -> Sequence[Tensor]:
        """`weighted_sum` of each of ``count`` equal parts of the samples, in tensors of their own."""
        step = self.batch // count
        return [self[k * step : (k + 1) * step].weighted_sum(weights, space) for k in range(count)]

    # Norms are computed once and kept.

    @property
    def has_norms(self) -> bool:
        """Have the norms been computed?"""
        return hasattr(self, "_norms")

    def cached_norms(self, space: Workspace | None = None) -> Tensor:
        """(B,): the tensor in which the norms are kept, only to be read; they are computed if need be."""
        if not self.has_norms:
            if self.batch and self.numel:
                self._norms = self._compute_norms(space or Workspace())
            else:
                self._norms = torch.zeros(self.batch, dtype=widest(self.device), device=self.device)
        return self._norms

    def set_norms(self, norms: Tensor) -> None:
        """Keep norms that have been computed elsewhere."""
        self._norms = norms

    def _compute_norms(self, space: Workspace) -> Tensor:
        """(B,): the norms of at least one sample and one element, in float64."""
        return norms_from_stacks(self, space)

    def cache_batch_independent_norms(self, space: Workspace) -> None:
        """Compute norms that do not depend on the rest of the batch, as `integer_sum` needs them, and keep them.

        How they are computed depends on the shapes of one sample alone. Gradients are not rounded to half precision.
        Where the norms of `cached_norms` are like that, nothing is done.
        """
        if self.has_norms or not self.batch or not self.numel:
            return
        if self.integer_sum_needs_stack:
            self._norms = torch.cat([row_norms(stack) for _, stack in precise_stacks(self, space)])
        elif self[:0].upcast().dtype != self.dtype:
            norms = []
            for some in space.chunks(self.batch, 2 * self.nbytes // self.batch):
                chunk = self[some].upcast()
                chunk.cache_batch_independent_norms(space)
                norms.append(chunk.cached_norms(space))
            self._norms = torch.cat(norms)

    # Rounding errors, which clipped sums (`bounded`) and private sums (`integer_sums`) take into account.

    @property
    def may_cancel(self) -> bool:
        """Can the terms that `weighted_sum` adds up for one sample cancel?"""
        return True

    def term_norms(self) -> Tensor:
        """(B,): at least the sum of the norms of the terms that `weighted_sum` adds up for each sample."""
        return self.norms()

    @property
    def bounds_sums(self) -> bool:
        """Does `bounded_sum` find the samples whose terms cancel by itself, though nothing else can look for them?"""
        return False

    def bounded_sum(self, weights: Tensor, space: Workspace) -> Tensor:
        """`weighted_sum`, to which no sample adds more than its weight times its norm if the factor ``bounds_sums``."""
        return self.weighted_sum(weights, space)

    def cancelling_samples(self, space: Workspace | None = None) -> Tensor:
        """Indices of samples whose terms are so much larger than their sum that their rounding errors show in it."""
        if not hasattr(self, "_cancelling"):
            if not self.may_cancel:
                return torch.empty(0, dtype=torch.long, device=self.device)
            norms = self.cached_norms(space)
            if not hasattr(self, "_cancelling"):  # the way to norms may have shown them
                self._cancelling = (self.term_norms() > self.largest_cancellation * norms).nonzero().squeeze(1)
        return self._cancelling

    @property
    def largest_cancellation(self) -> float:
        """How many times larger than their sum the terms may be, before their rounding errors show in it."""
        dtype = wide(self.dtype).to_real()
        return (1e-9 if dtype == torch.float64 else 1e-4) / torch.finfo(dtype).eps

    def upcast(self, dtype: torch.dtype | None = None) -> Factor:
        """These gradients computed in a wider dtype; by default in float32, where it would be in half precision."""
        return self

    def rounding_errors(self) -> Tensor:
        """(B,): how far a gradient that is written out is from the exact one at most, as a norm."""
        return roundoff(self.dtype) * self.term_norms()

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        """(B,): upper bounds of the norms of the exact gradients, and of those that are written out."""
        self.cache_batch_independent_norms(space or Workspace())
        return self.cached_norms(space) * norm_error(self.dtype) + 2 * self.rounding_errors()

    @property
    def integer_sum_needs_stack(self) -> bool:
        """Does `integer_sum` write gradients out to round them? That depends on the shapes of one sample alone."""
        return True

    def integer_sum(self, unit: Unit, space: Workspace) -> IntegerSum:
        """A weighted sum without rounding errors, of gradients that are rounded to whole numbers of a unit first."""
        return StackSum(self, unit, space)
