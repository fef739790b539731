"""Samples in groups, each with a factor of its own: sequences of different lengths, loops over samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.norms import wide, widest
from ..numberless import with_numbers
from .base import Factor, Selection, Shape
from .integer_sums import GroupedSum, IntegerSum
from .limits import Unit
from .moments import Sides, added, empty_moments, sum_of
from .workspace import Workspace

Group = tuple[Tensor, Factor]  # the numbers of some samples (b,), on the CPU, and the factor of these


class Apart(Factor):
    """gradient[index[j]] = factor[j] for every group (index, factor); no sample is in two, and zeros are in none."""

    __slots__ = ("_batch", "groups")

    def __init__(self, groups: Sequence[Group], batch: int) -> None:
        self.groups, self._batch = list(groups), batch

    @property
    def batch(self) -> int:
        return self._batch

    @property
    def shape(self) -> Shape:
        return self.groups[0][1].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.groups[0][1].dtype

    @property
    def device(self) -> torch.device:
        return self.groups[0][1].device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for _, factor in self.groups for t in factor.tensors)

    @property
    def nbytes(self) -> int:
        return sum([factor.nbytes for _, factor in self.groups])

    def __getitem__(self, samples: Selection) -> Apart:
        groups: list[Group] = []
        for factor, (index, kept) in zip(self._factors, self._selected(samples), strict=True):
            if len(kept) == factor.batch:
                groups.append((index, factor))
            elif len(kept):
                groups.append((index, factor[kept.to(factor.device)]))
        first = self._factors[0]
        return Apart(groups or [(torch.empty(0, dtype=torch.long, device="cpu"), first[:0])], self._count(samples))

    @with_numbers
    def _selected(self, samples: Selection) -> list[tuple[Tensor, Tensor]]:
        """For every group, the new numbers of the samples that are selected of it, and their places in the group."""
        chosen = torch.arange(self._batch, device="cpu")[samples if isinstance(samples, slice) else samples.to("cpu")]
        place = torch.full((self._batch,), -1, device="cpu")
        place[chosen] = torch.arange(len(chosen), device="cpu")
        found = []
        for index, _ in self.groups:
            kept = (place[index] >= 0).nonzero().squeeze(1)
            found.append((place[index[kept]], kept))
        return found

    def _count(self, samples: Selection) -> int:
        return len(range(self._batch)[samples]) if isinstance(samples, slice) else len(samples)

    @property
    def _factors(self) -> list[Factor]:
        return [factor for _, factor in self.groups]

    @property
    def _is_complete(self) -> bool:
        return sum([len(index) for index, _ in self.groups]) == self._batch

    def each(self, change: Callable[[Factor], Factor | None]) -> Apart | None:
        """The same with every group's factor changed; None if one of them cannot be."""
        changed = [(index, new) for index, factor in self.groups if (new := change(factor)) is not None]
        return Apart(changed, self._batch) if len(changed) == len(self.groups) else None

    def _placed(self, ask: Callable[[Factor], Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """(B, ...): what every group says of its samples, zeros for the others."""
        answers = [(index, ask(factor)) for index, factor in self.groups]
        first = answers[0][1]
        total = first.new_zeros(self._batch, *first.shape[1:], dtype=dtype)
        for index, answer in answers:
            total.index_copy_(0, index.to(total.device, non_blocking=True), answer.to(total.dtype))
        return total

    def stack(self, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(self._batch, *self.shape, dtype=self.dtype, device=self.device)
        if not self._is_complete:
            out.zero_()
        for index, factor in self.groups:
            out.index_copy_(0, index.to(out.device, non_blocking=True), factor.stack().to(out.dtype))
        return out

    def add_to(self, out: Tensor) -> None:
        for index, factor in self.groups:
            out.index_add_(0, index.to(out.device, non_blocking=True), factor.stack().to(out.dtype))

    def elements(self, start: int, stop: int) -> Tensor | None:
        total: Tensor | None = None
        for index, factor in self.groups:
            some = factor.elements(start, stop)
            if some is None:
                return None
            total = some.new_zeros(self._batch, some.shape[1]) if total is None else total
            total.index_copy_(0, index.to(total.device, non_blocking=True), some)
        return total

    def prefers_stack(self, reused: bool) -> bool:
        """As most samples do."""
        return sum([f.batch if f.prefers_stack(reused) else -f.batch for f in self._factors]) > 0

    def _compute_norms(self, space: Workspace) -> Tensor:
        return self._placed(lambda factor: factor.cached_norms(space), widest(self.device))

    def set_norms(self, norms: Tensor) -> None:
        super().set_norms(norms)
        for index, factor in self.groups:
            factor.set_norms(norms[index.to(norms.device)])

    def cache_batch_independent_norms(self, space: Workspace) -> None:
        if not self.has_norms:
            for factor in self._factors:
                factor.cache_batch_independent_norms(space)

    @property
    def may_cancel(self) -> bool:
        return any(factor.may_cancel for factor in self._factors)

    def cancelling_samples(self, space: Workspace | None = None) -> Tensor:
        found = [(index, factor.cancelling_samples(space)) for index, factor in self.groups]
        return torch.cat([index.to(samples.device)[samples] for index, samples in found])

    def term_norms(self) -> Tensor:
        return self._placed(lambda factor: factor.term_norms(), widest(self.device))

    def rounding_errors(self) -> Tensor:
        return self._placed(lambda factor: factor.rounding_errors(), widest(self.device))

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        return self._placed(lambda factor: factor.norm_bounds(space), widest(self.device))

    def upcast(self, dtype: torch.dtype | None = None) -> Factor:
        return Apart([(index, factor.upcast(dtype)) for index, factor in self.groups], self._batch)

    @property
    def integer_sum_needs_stack(self) -> bool:
        """Every group decides for itself: how a sample is rounded must not depend on those of other groups."""
        return False

    def integer_sum(self, unit: Unit, space: Workspace) -> IntegerSum:
        return GroupedSum([(index, factor.integer_sum(unit, space)) for index, factor in self.groups], self._batch)

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        sums = [factor.weighted_sum(weights[index.to(weights.device)], space) for index, factor in self.groups]
        total = sums[0]
        for each in sums[1:]:
            total = total + each
        return total

    def sum_squares(self, center: Tensor | None = None, space: Workspace | None = None) -> Tensor:
        if center is not None:
            return super().sum_squares(center, space)
        total = self._factors[0].sum_squares(None, space)
        for factor in self._factors[1:]:
            total = total + factor.sum_squares(None, space)
        return total

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        return self._placed(lambda factor: factor.dot(directions, space))

    def moments(self, left: bool, right: bool, space: Workspace | None = None) -> Sides:
        total = empty_moments(self, left, right)
        for part in self._factors:
            total = added(total, part.moments(left, right, space))
        return total

    def rotated_squares(self, left: Tensor | None, right: Tensor | None, space: Workspace | None = None) -> Tensor:
        return sum_of([part.rotated_squares(left, right, space) for part in self._factors])

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        return self._placed(lambda factor: factor.compress(left, right, space))

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        total = torch.zeros(self._batch, other.batch, dtype=wide(self.dtype).to_real(), device=self.device)
        theirs: Sequence[Group] = other.groups if isinstance(other, Apart) else ()
        for index, factor in self.groups:
            rows = total.new_zeros(factor.batch, other.batch) if theirs else factor.gram(other, space)
            for columns, their in theirs:
                rows.index_copy_(1, columns.to(rows.device), factor.gram(their, space).to(rows.dtype))
            total.index_copy_(0, index.to(total.device), rows.to(total.dtype))
        return total
