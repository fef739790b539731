"""What every factor answers.

A factor need only know how to write its gradients out (`stack`) and how to leave samples away (`__getitem__`):
everything else has an answer here that writes out a few samples at a time. A factor with a shorter way overrides it.
Inner products are real: a complex gradient counts as the vector of its real and imaginary parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from ..kernels.gram import gram_norms
from ..kernels.norms import row_norms, wide, widest
from .exact import Exact, Written
from .limits import Unit, norm_error, roundoff
from .workspace import Workspace

Shape = tuple[int, ...]
_MUCH = 128  # times larger than a gradient are terms whose rounding shows in it
_SMALLEST_WEIGHT = 1e-30  # below, float32 loses digits

Selection = slice | Tensor  # a range, or the indices of some samples


class Factor(ABC):
    """The gradients of B samples with respect to one tensor of a given ``shape``."""

    __slots__ = ("_imprecise", "_norms")
    _norms: Tensor
    _imprecise: Tensor  # samples whose terms were seen to cancel, or may have

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
        """What the gradients are made from; the first has their dtype."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.tensors[0].device

    @property
    def nbytes(self) -> int:
        """How much memory the factor keeps alive."""
        return sum([t.nbytes for t in self.tensors])

    @abstractmethod
    def stack(self, out: Tensor | None = None) -> Tensor:
        """(B, *shape): every gradient, written into ``out`` if it is given."""

    @abstractmethod
    def __getitem__(self, samples: Selection) -> Factor:
        """The same for some of the samples."""

    def add_to(self, out: Tensor) -> None:
        """out += stack()."""
        out += self.stack()

    @property
    def numel(self) -> int:
        """Elements of one sample's gradient."""
        return prod(self.shape)

    @property
    def stack_bytes(self) -> int:
        """The size of `stack()`."""
        return self.batch * self.numel * self.dtype.itemsize

    @property
    def cancels(self) -> bool:
        """Can the terms that `weighted_sum` adds up for one sample cancel?"""
        return True

    def prefers_stack(self, reused: bool) -> bool:
        """Is writing the gradients out the fastest way to their norms, or to norms and sums if it is ``reused``?"""
        return True

    def stacks(self, space: Workspace) -> Iterator[tuple[slice, Tensor]]:
        """The gradients of a few samples at a time: only to be read, and before ``space`` is used for anything else."""
        for some in space.chunks(self.batch, self.numel * self.dtype.itemsize):
            buffer = space.take((some.stop - some.start, *self.shape), self.dtype, self.device)
            part = self if some.stop - some.start == self.batch else self[some]
            yield some, part.stack(buffer)

    def elements(self, start: int, stop: int) -> Tensor | None:
        """(B, stop - start): a range of every flattened gradient; None if that costs as much as all of it."""
        return None

    @property
    def knows_norms(self) -> bool:
        """Have norms been computed?"""
        return hasattr(self, "_norms")

    def norms(self, space: Workspace | None = None) -> Tensor:
        """(B,): the norm of every gradient, in float64 (computed once)."""
        return self.own_norms(space).clone()

    def take_norms(self, norms: Tensor) -> None:
        """Let these be the norms, as somebody has computed them already."""
        self._norms = norms

    def own_norms(self, space: Workspace | None = None) -> Tensor:
        """(B,): the norms, only to be read."""
        if not self.knows_norms:
            if self.batch and self.numel:
                self._norms = self._compute_norms(space or Workspace())
            else:
                self._norms = torch.zeros(self.batch, dtype=widest(self.device), device=self.device)
        return self._norms

    def _compute_norms(self, space: Workspace) -> Tensor:
        return torch.cat([row_norms(part) for _, part in self.stacks(space)])

    def measure(self, space: Workspace) -> None:
        """Find the norms in a way that depends on the shapes of one sample alone, and not on the batch.

        They are those of gradients that are not rounded to half precision.
        """
        if self.knows_norms or not self.batch or not self.numel:
            return
        if self.rounds_written:
            self._norms = torch.cat([row_norms(part) for _, part in self.wide_stacks(space)])
        elif self[:0].widened().dtype != self.dtype:
            found = []
            for some in space.chunks(self.batch, 2 * self.nbytes // self.batch):
                part = self[some].widened()
                part.measure(space)
                found.append(part.own_norms(space))
            self._norms = torch.cat(found)

    def widened(self, dtype: torch.dtype | None = None) -> Factor:
        """The same computed in another precision; by default in float32, where it would be in half precision."""
        return self

    def wide_stacks(self, space: Workspace) -> Iterator[tuple[slice, Tensor]]:
        """`stacks` that are not rounded to half precision, nor made of rounding where terms cancel."""
        if wide(self.dtype) == self.dtype:
            stacks = self.stacks(space)
        else:
            each = self.numel * wide(self.dtype).itemsize
            stacks = ((some, self[some].widened().stack()) for some in space.chunks(self.batch, each))
        for some, part in stacks:
            if self.cancels and part.dtype in (torch.float32, torch.complex64):
                self[some]._write_again(part)
            yield some, part

    def _write_again(self, stack: Tensor) -> Tensor:
        """In float64 those gradients that are so much smaller than their terms that rounding would show; the norms."""
        norms = row_norms(stack)
        small = (self.sizes() > _MUCH * norms).nonzero().squeeze(1)
        if small.numel():
            stack[small] = self[small].widened(torch.float64).stack().to(stack.dtype)
            norms[small] = row_norms(stack[small])
        return norms

    def _norms_by_gram(
        self,
        parts: Iterable[Sequence[Tensor]],
        groups: int,
        space: Workspace,
        scale: float = 1.0,
        memo: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Norms from the Gram matrices of pairs (b·groups, T, ·), b samples at a time, times ``scale``."""
        found, holds = [], []
        for left, right in parts:
            shared = memo if len(left) == self.batch * groups else None
            norms, ok = gram_norms(left, right, self.dtype, shared)
            if groups != 1:
                norms, ok = row_norms(norms.view(-1, groups)), ok.view(-1, groups).all(1)
            found.append(norms)
            holds.append(ok)
        return self.checked(torch.cat(found) * scale, torch.cat(holds), space)

    def checked(self, norms: Tensor, holds: Tensor, space: Workspace) -> Tensor:
        """Norms that were found in a shorter way, those that do not hold computed from the gradients themselves."""
        self._imprecise = (~holds).nonzero().squeeze(1)
        if self._imprecise.numel():
            norms[self._imprecise] = Factor._compute_norms(self[self._imprecise], space)
        return norms

    def sizes(self) -> Tensor:
        """(B,): at least the sum of the norms of the terms that `weighted_sum` adds up for each sample."""
        return self.norms()

    def imprecise(self, space: Workspace | None = None) -> Tensor:
        """Samples whose terms are so much larger than their sum that they carry their rounding into it."""
        if not hasattr(self, "_imprecise"):
            if not self.cancels:
                return torch.empty(0, dtype=torch.long, device=self.device)
            norms = self.own_norms(space)
            if not hasattr(self, "_imprecise"):
                dtype = wide(self.dtype).to_real()
                digits = 1e-9 if dtype == torch.float64 else 1e-4
                self._imprecise = (torch.finfo(dtype).eps * self.sizes() > digits * norms).nonzero().squeeze(1)
        return self._imprecise

    def bounded_sum(self, weights: Tensor, space: Workspace | None = None, apart: Tensor | None = None) -> Tensor:
        """`weighted_sum`, but no sample adds more than its weight times its norm, up to a few digits.

        The gradients of imprecise samples, and of those whose weights are too small for float32, are written out
        first. ``apart`` is `vanishing` of the weights, if it is known.
        """
        weights = weights.to(self.device)
        apart = vanishing(weights) if apart is None else apart.to(self.device)
        if self.cancels or hasattr(self, "_imprecise"):
            apart = torch.cat([self.imprecise(space), apart])
        if not apart.numel():
            return self.weighted_sum(weights, space)
        apart = apart.unique()
        total = self.weighted_sum(weights.index_fill(0, apart, 0), space)
        return total + self[apart]._written_sum(weights[apart], space or Workspace())

    def _written_sum(self, weights: Tensor, space: Workspace) -> Tensor:
        """`weighted_sum` of gradients that are written out, in float64."""
        total = torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        into = real_rows(total.unsqueeze(0)).squeeze(0)
        for some, part in self.stacks(space):
            for weight, row in zip(weights[some], real_rows(part), strict=True):
                into += (row.to(weight.dtype) * weight).to(into.dtype)
        return total

    def rounding(self) -> Tensor:
        """(B,): how far rounding can carry a gradient that is written out away from what it is; at most."""
        return roundoff(self.dtype) * self.sizes()

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        """(B,): at least the norms, of gradients as they are and as they are written out, whatever was rounded."""
        self.measure(space or Workspace())
        return self.own_norms(space) * norm_error(self.dtype) + 2 * self.rounding()

    @property
    def rounds_written(self) -> bool:
        """Are gradients written out to be rounded in `exact`? That depends on the shapes of one sample alone."""
        return True

    def exact(self, unit: Unit, space: Workspace) -> Exact:
        """The same to be summed without rounding, in whole numbers of a unit."""
        return Written(self, unit, space)

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        """(*shape): Σ_b weights[b] · gradient[b], in float32 or wider."""
        total = torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        into = real_rows(total.unsqueeze(0))
        for some, part in self.stacks(space or Workspace()):
            rows = real_rows(part)
            into.addmm_(weights[some].to(rows.dtype).unsqueeze(0), rows)
        return total

    def weighted_sums(self, count: int, weights: Tensor, space: Workspace) -> Sequence[Tensor]:
        """`weighted_sum` of each of ``count`` equal parts of the samples, in tensors of their own."""
        step = self.batch // count
        return [self[k * step : (k + 1) * step].weighted_sum(weights, space) for k in range(count)]

    def sum_squares(self, center: Tensor | None = None, space: Workspace | None = None) -> Tensor:
        """(*shape): Σ_b |gradient[b]|², in float32 or wider; with a ``center`` near the mean, of deviations from it.

        The center only has to be near: Σ|g - mean|² = Σ|g - c|² - |Σ(g - c)|² / B for any c.
        """
        dtype = wide(self.dtype)
        total = torch.zeros(self.shape, dtype=dtype.to_real(), device=self.device)
        off = torch.zeros(self.shape, dtype=dtype, device=self.device) if center is not None else None
        for _, part in self.stacks(space or Workspace()):
            rows = part.to(dtype)
            if center is not None and off is not None:
                rows = rows - center.to(dtype)
                off += rows.sum(0)
            total += squares(rows).sum(0)
        return total if off is None else total.sub_(squares(off) / max(self.batch, 1)).clamp_(min=0)

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        """(B, k): the inner product of every gradient with each of ``directions`` (k, *shape)."""
        against = real_rows(directions.to(wide(self.dtype))).t()
        found = [real_rows(part) @ against for _, part in self.stacks(space or Workspace())]
        return torch.cat(found) if found else against.new_zeros(0, len(directions))

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        """(B, B'): the inner product of every gradient with each of another factor's."""
        space = space or Workspace()
        dtype = wide(self.dtype).to_real()
        found = torch.empty(self.batch, other.batch, dtype=dtype, device=self.device)
        if self.stack_bytes > space.limit and self._gram_by_elements(other, space, found):
            return found
        for mine, part in self.stacks(space.whole()):
            rows = real_rows(part)
            for theirs, against in other.stacks(space):
                torch.mm(rows, real_rows(against).to(dtype).t(), out=found[mine, theirs])
        return found

    def _gram_by_elements(self, other: Factor, space: Workspace, found: Tensor) -> bool:
        """All samples at once, a range of elements at a time; False if there is no short way to ranges."""
        found.zero_()
        both = self.batch + other.batch
        for some in space.chunks(self.numel, both * found.dtype.itemsize, least=self.numel // both):
            mine, theirs = (f.elements(some.start, some.stop) for f in (self, other))
            if mine is None or theirs is None:
                return False
            found.addmm_(mine.to(found.dtype), theirs.to(found.dtype).t())
        return True

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        """(B, k, l): leftᵀ · gradient · right for left (n, k) and right (m, l), gradients seen as n x m matrices."""
        n, m = len(left), len(right)
        left, right = (t.to(wide(self.dtype).to_real()) for t in (left, right))
        found = [
            torch.matmul(left.t(), real_rows(part).view(len(part), n, m) @ right)
            for _, part in self.stacks(space or Workspace())
        ]
        return torch.cat(found) if found else left.new_zeros(0, left.shape[1], right.shape[1])


def vanishing(weights: Tensor) -> Tensor:
    """Which weights are not zero, but too small for float32."""
    return ((weights < _SMALLEST_WEIGHT) & (weights > 0)).nonzero().squeeze(1)


def deliver(value: Tensor, out: Tensor | None) -> Tensor:
    """Return ``value``, through the buffer ``out`` if there is one."""
    return value if out is None else out.copy_(value)


def squares(t: Tensor) -> Tensor:
    """|t|²."""
    return (t.abs() if t.is_complex() else t).square()


def real_rows(stack: Tensor) -> Tensor:
    """(B, ...) as a matrix of B rows of real numbers, float32 or wider."""
    if stack.is_complex():
        stack = torch.view_as_real(stack.resolve_conj())
    return stack.to(wide(stack.dtype)).reshape(len(stack), prod(stack.shape[1:]))
