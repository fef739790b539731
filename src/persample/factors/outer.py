"""Sums of outer products: the gradients of everything that is a matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from ..kernels.devices import can_look, has_fast_float64, launches_cost
from ..kernels.differentiable import is_differentiable
from ..kernels.gram import BLOCK, terms_in
from ..kernels.norms import root, row_norms, wide, widest
from ..kernels.products import inner_products, sums_of_parts, sums_of_products, whole_sums
from ..numberless import storage_of
from .base import Factor, Selection, Shape
from .integer_sums import STACK_ELEMENTS, STACK_POSITIONS, IntegerSum, ProductSum
from .limits import Unit, gram_bounds, roundoff
from .moments import Sides, moments_of_products, rotated_products
from .norms import norms_from_gram
from .stacks import separated
from .workspace import Workspace

# What writing and reading one element costs, in multiplications of a matrix product: of both Gram matrices, of a stack
# in scratch memory, and of a stack that is kept and read twice.
_GRAM_COST, _SCRATCH_COST, _KEPT_COST = 60, 12, 30


# The same for accelerators, by arithmetic: ten products take as long as a byte of memory traffic. There, Gram matrices
# are whole, and in float64, which takes twice as long.
_ACCELERATOR_STACK, _ACCELERATOR_REREAD, _ACCELERATOR_PAIR, _ACCELERATOR_CAST = 80, 40, 320, 120


def prefers_stack(
    T: int, p: int, d: int, *, dtype: torch.dtype, device: torch.device, reused: bool, shared: bool = False
) -> bool:
    """Do Gram matrices of T positions cost more than a stack of p x d elements? A reused one saves T·p·d later."""
    if T <= 1:
        return False
    if dtype.is_complex:
        return True
    if not launches_cost(device):
        pairs = T * (T + min(T, BLOCK)) // 2
        gram, stack = pairs * ((p // 2 if shared else p) + d + _GRAM_COST), p * d * (T + _SCRATCH_COST)
        return gram > (p * d * _KEPT_COST if reused else stack)
    stack, by_gram = p * d * (T + _ACCELERATOR_STACK), inf
    if dtype in (torch.float32, torch.bfloat16) and has_fast_float64(device):  # else Gram matrices are not precise
        by_gram = T * T * (2 * (p + d) + _ACCELERATOR_PAIR) + T * (p + d) * _ACCELERATOR_CAST
    return min(by_gram, stack) + p * d * T > stack + p * d * _ACCELERATOR_REREAD if reused else by_gram > stack


Reads = dict[str, Any]  # at most one product: its key, the matrix, which keeps the key valid, and the product


class Outer(Factor):
    """gradient[b] = Σ_t left[b, t] ⊗ right[b, t], for left (B, *G, T, p) and right (B, *G, T, d): (B, *G, p, d)."""

    __slots__ = ("_side_norms", "left", "memo", "reads", "right", "scale")
    _side_norms: tuple[Tensor, Tensor]

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        scale: float = 1.0,
        memo: dict[str, Tensor] | None = None,
        reads: tuple[Reads, Reads] | None = None,
    ) -> None:
        self.left, self.right, self.scale = left, right, scale
        self.memo = memo  # results about ``left`` that factors with the same one share
        self.reads = ({}, {}) if reads is None else reads  # products of ``left`` and ``right`` with a matrix

    @property
    def batch(self) -> int:
        return len(self.left)

    @property
    def positions(self) -> int:
        """T."""
        return self.left.shape[-2]

    @property
    def shape(self) -> Shape:
        return (*self.left.shape[1:-2], self.left.shape[-1], self.right.shape[-1])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.left, self.right

    def __getitem__(self, samples: Selection) -> Outer:
        return Outer(self.left[samples], self.right[samples], self.scale, None if self.memo is None else {})

    def upcast(self, dtype: torch.dtype | None = None) -> Outer:
        dtype = dtype or wide(self.dtype)
        dtype = dtype.to_complex() if self.dtype.is_complex and not dtype.is_complex else dtype
        if dtype == self.dtype:
            return self
        memo = None if self.memo is None else dict[str, Tensor]()
        return Outer(self.left.to(dtype), self.right.to(dtype), self.scale, memo)

    def t(self) -> Outer:
        """Every gradient transposed."""
        return Outer(self.right, self.left, self.scale, reads=self.reads[::-1])

    def scaled(self, rows: Tensor | None, columns: Tensor | None) -> Outer:
        """Every gradient times a number for each row (p,), or for each column (d,)."""
        left = self.left if rows is None else self.left * rows
        right = self.right if columns is None else self.right * columns
        kept: tuple[Reads, Reads] = (
            {} if rows is not None else self.reads[0],
            {} if columns is not None else self.reads[1],
        )
        return Outer(left, right, self.scale, reads=kept)

    def read(self, matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """(B, T, p): right @ matrixᵀ for a matrix (p, d), only to be read.

        The last product is kept until norms are known: what a weight is normalised by needs it several times.
        """
        kept, dtype = self.reads[1], dtype or self.dtype
        if is_differentiable():  # the same numbers may come with another graph
            return self.right.to(dtype) @ matrix.to(dtype).t()
        key = storage_of(matrix), matrix.storage_offset(), matrix.shape, matrix.stride(), dtype
        if not kept or kept["key"] != key:
            kept.update(key=key, matrix=matrix, product=self.right.to(dtype) @ matrix.to(dtype).t())
        product: Tensor = kept["product"]
        return product

    def forget_reads(self) -> None:
        """Let go of products that were kept."""
        for kept in self.reads:
            kept.clear()

    @property
    def may_cancel(self) -> bool:
        return self.positions > 1

    @staticmethod
    def concatenate(factors: Sequence[Outer]) -> Outer:
        """One factor for the sum: positions of all of them, one after another."""
        left = torch.cat([f.left if f.scale == 1.0 else f.left * f.scale for f in factors], -2)
        return Outer(left, torch.cat([f.right for f in factors], -2))

    def stack(self, out: Tensor | None = None) -> Tensor:
        left = self.left.mT
        if out is not None and (not out.is_contiguous() or out.dtype != self.dtype or is_differentiable()):
            return out.copy_(self.stack())
        # A broadcast product reads and writes once; its derivative would write it out twice more.
        if self.positions == 1 and self.left.ndim == 3 and not is_differentiable():
            result = torch.mul(left, self.right, out=out) if out is not None else left * self.right
        elif out is not None:
            multiply = torch.bmm if left.ndim == 3 else torch.matmul  # the latter copies
            result = multiply(left, self.right, out=out)
        else:
            result = left @ self.right
        return result.mul_(self.scale) if self.scale != 1.0 else result

    def add_to(self, out: Tensor) -> None:
        if self.left.ndim == 3 and out.dtype == self.dtype:
            out.baddbmm_(self.left.mT, self.right, alpha=self.scale)
        else:
            out += self.stack()

    def elements(self, start: int, stop: int) -> Tensor | None:
        if self.left.ndim != 3 or self.dtype.is_complex:
            return None
        d = self.right.shape[-1]
        first, last = start // d, (stop - 1) // d + 1
        rows = Outer(self.left[..., first:last], self.right, self.scale)
        if last - first == 1:
            rows.right, start, stop = self.right[..., start - first * d : stop - first * d], 0, stop - start
        else:
            start, stop = start - first * d, stop - first * d
        return rows.stack().flatten(1)[:, start:stop]

    def prefers_stack(self, reused: bool) -> bool:
        sizes = self.positions, self.left.shape[-1], self.right.shape[-1]
        shared = self.memo is not None
        return prefers_stack(*sizes, dtype=self.dtype, device=self.device, reused=reused, shared=shared)

    def _compute_norms(self, space: Workspace) -> Tensor:
        self.forget_reads()
        if not self.positions:
            return torch.zeros(self.batch, dtype=widest(self.device), device=self.device)
        if is_differentiable() and self.left.ndim != 3:  # the norm of a group of zeros has no second derivative
            return super()._compute_norms(space)
        if self.positions == 1:
            return self._product_norms()
        return super()._compute_norms(space) if self.prefers_stack(False) else self._gram_norms(space)

    def _product_norms(self) -> Tensor:
        """One position: ‖l ⊗ r‖ = ‖l‖‖r‖ for every group, and the norm of these."""
        left, right = (t.reshape(-1, t.shape[-1]) for t in (self.left, self.right))
        each = self.side_norms[0] * self.side_norms[1] if self.left.ndim == 3 else row_norms(left) * row_norms(right)
        if self.scale != 1.0:
            each *= abs(self.scale)
        limit = torch.finfo(self.dtype).max
        # Infinite where an element is too large for the gradients' dtype. Norms beyond float32 become so by themselves.
        if bool((each > limit).any()) if can_look(self.device) else self.dtype == torch.float16:
            largest = left.abs().amax(1).to(each) * right.abs().amax(1).to(each) * abs(self.scale)
            each = each.masked_fill(largest > limit, float("inf"))
        return each if self.left.ndim == 3 else row_norms(each.view(self.batch, -1))

    def _gram_norms(self, space: Workspace) -> Tensor:
        if launches_cost(self.device):
            return self._precise_gram_norms(space)
        dtype, T, groups = wide(self.dtype), self.positions, prod(self.left.shape[1:-2])
        some = space.chunks(self.batch, 2 * groups * min(T, BLOCK) * T * dtype.itemsize)
        both = self.left, self.right
        pairs = ([t[b].to(dtype).reshape(-1, T, t.shape[-1]) for t in both] for b in some)
        return norms_from_gram(self, pairs, groups, space, abs(self.scale), self.memo)

    def _precise_gram_norms(self, space: Workspace) -> Tensor:
        """Norms from Gram matrices in float64. Their errors are a root of its, hence those of float32 at most."""
        T, groups = self.positions, prod(self.left.shape[1:-2])
        each = groups * T * (2 * T + self.left.shape[-1] + self.right.shape[-1]) * widest(self.device).itemsize
        norms = []
        for some in space.chunks(self.batch, each):
            left, right = (t[some].to(widest(self.device)) for t in (self.left, self.right))
            squares = torch.matmul(left, left.mT).mul_(torch.matmul(right, right.mT)).sum((-2, -1))
            norms.append(squares.flatten(1).sum(1) if groups != 1 else squares.flatten())
        return root(torch.cat(norms)) * abs(self.scale)

    def term_norms(self) -> Tensor:
        """Σ_t ‖l_t‖‖r_t‖ ≤ ‖l‖‖r‖."""
        if self.positions <= 1:
            return self.norms()
        return self.side_norms[0] * self.side_norms[1] * abs(self.scale)

    @property
    def side_norms(self) -> tuple[Tensor, Tensor]:
        """(B,) each: the norms of left[b] and of right[b], over all positions (computed once)."""
        if not hasattr(self, "_side_norms"):
            self._side_norms = row_norms(self.left), row_norms(self.right)
        return self._side_norms

    @property
    def integer_sum_needs_stack(self) -> bool:
        return self.dtype.is_complex or (self.positions >= STACK_POSITIONS and self.numel <= STACK_ELEMENTS)

    def rounding_errors(self) -> Tensor:
        terms = 4 * self.positions if self.dtype.is_complex else self.positions  # a complex product is four real ones
        return roundoff(self.dtype, terms) * self.term_norms()

    def norm_bounds(self, space: Workspace | None = None) -> Tensor:
        if self.positions <= 1 or self.integer_sum_needs_stack or self.prefers_stack(False):
            return super().norm_bounds(space)
        self.cache_batch_independent_norms(space or Workspace())
        norms = self.cached_norms(space)
        terms = terms_in(self.left.shape[-1]) + terms_in(self.right.shape[-1])
        return gram_bounds(norms, self.term_norms(), terms, self.dtype)

    def integer_sum(self, unit: Unit, space: Workspace) -> IntegerSum:
        if self.integer_sum_needs_stack:
            return super().integer_sum(unit, space)
        sides, bounds = (self.left, self.right), self.norm_bounds(space)
        return ProductSum(sides, self.side_norms, whole_sums, bounds, unit, space, scale=self.scale)

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        """One product (weights · left)ᵀ @ right over all samples and positions."""
        return sums_of_products(*self._weighted(weights))

    def weighted_sums_of_parts(self, count: int, weights: Tensor, space: Workspace) -> Sequence[Tensor]:
        """One batched product for all parts."""
        if self.left.ndim != 3:
            return super().weighted_sums_of_parts(count, weights, space)
        return separated(sums_of_parts(*self._weighted(weights.repeat(count)), count))

    def _weighted(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Both sides in float32 or wider, the smaller one times weights and scale."""
        dtype = wide(self.dtype)
        scaled = weights.to(dtype.to_real()).view(-1, *[1] * (self.left.ndim - 1))
        if self.scale != 1.0:
            scaled = scaled * self.scale
        left, right = self.left.to(dtype), self.right.to(dtype)
        return (left * scaled, right) if left.shape[-1] <= right.shape[-1] else (left, right * scaled)

    def sum_squares(self, center: Tensor | None = None, space: Workspace | None = None) -> Tensor:
        """One position: Σ (l ⊗ r)² = (l²)ᵀ(r²), less the square of the mean; in float64, as the terms may cancel."""
        dtype = widest(self.device)
        short = self.positions == 1 and self.left.ndim == 3 and not self.dtype.is_complex
        if not short or (center is not None and self.dtype == dtype):
            return super().sum_squares(center, space)
        left, right = self.left.squeeze(1).to(dtype) * self.scale, self.right.squeeze(1).to(dtype)
        total = left.square().t() @ right.square()
        if center is not None:
            total -= (left.t() @ right).square_() / max(self.batch, 1)
        return total.clamp_(min=0).to(wide(self.dtype))

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        """Σ_t l_tᵀ V r_t; with several positions and more than two directions, writing gradients out costs less."""
        if self.dtype.is_complex or (self.positions > 1 and len(directions) > 2) or not self.positions:
            return super().dot(directions, space)
        dtype = wide(self.dtype)
        left, right, directions = self.left.to(dtype), self.right.to(dtype), directions.to(dtype)
        if self.left.ndim == 3 and self.positions == 1 and len(directions) > 1:
            return _products_with_many(left.squeeze(1), right.squeeze(1), directions, space) * self.scale
        products = [(left * (right @ v.mT)).flatten(1).sum(1) for v in directions]
        return torch.stack(products, 1) * self.scale if products else left.new_zeros(self.batch, 0)

    def dot_and_sum(self, direction: Tensor, weights: Tensor, space: Workspace | None = None) -> tuple[Tensor, Tensor]:
        """A stack takes the multiplications of one of the two."""
        if self.positions and self.prefers_stack(reused=True):
            return self._dot_and_sum_of_stacks(direction, weights, space)
        return super().dot_and_sum(direction, weights, space)

    def sides_of_sum(self, weights: Tensor) -> tuple[Tensor, Tensor] | None:
        rows, p, d = self.batch * self.positions, self.left.shape[-1], self.right.shape[-1]
        if self.left.ndim != 3 or self.dtype.is_complex or rows * (p + d) >= p * d:
            return None
        left, right = self._weighted(weights)
        return left.flatten(0, 1), right.flatten(0, 1)

    def dot_product(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        """Σ_t Σ_s (l_t · left_s) (r_t · right_s)."""
        if self.left.ndim != 3 or self.dtype.is_complex:
            return super().dot_product(left, right, space)
        dtype = wide(self.dtype)
        products = (self.left.to(dtype) @ left.to(dtype).t()) * (self.right.to(dtype) @ right.to(dtype).t())
        return products.flatten(1).sum(1) * self.scale

    def gram(self, other: Factor, space: Workspace | None = None) -> Tensor:
        """One position each: (l l'ᵀ) ∘ (r r'ᵀ)."""
        if not isinstance(other, Outer) or self.dtype.is_complex or self.left.ndim != 3 or other.left.ndim != 3:
            return super().gram(other, space)
        if self.positions != 1 or other.positions != 1:
            return super().gram(other, space)
        products = torch.full((), self.scale * other.scale, dtype=widest(self.device), device=self.device)
        for mine, theirs in ((self.left, other.left), (self.right, other.right)):
            products = products * inner_products(mine.squeeze(1), theirs.squeeze(1))
        return products

    def compress(self, left: Tensor, right: Tensor, space: Workspace | None = None) -> Tensor:
        """Σ_t (l_t left) ⊗ (r_t right), over all groups: their matrices lie below each other."""
        if len(right) != self.right.shape[-1] or self.dtype.is_complex:
            return super().compress(left, right, space)
        dtype, groups = wide(self.dtype), self.left.shape[1:-2]
        of_groups = left.to(dtype).reshape(*groups, self.left.shape[-1], left.shape[1])
        compressed = (self.left.to(dtype) @ of_groups).mT @ (self.right.to(dtype) @ right.to(dtype))
        if groups:
            compressed = compressed.flatten(1, -3).sum(1)
        return compressed * self.scale

    def moments(self, left: bool, right: bool, space: Workspace | None = None) -> Sides:
        found = moments_of_products(self, left, right, space or Workspace())
        return super().moments(left, right, space) if found is None else found

    def rotated_squares(self, left: Tensor | None, right: Tensor | None, space: Workspace | None = None) -> Tensor:
        sides = rotated_products(self, left, right)
        return super().rotated_squares(left, right, space) if sides is None else Outer(*sides).sum_squares(None, space)


def _products_with_many(left: Tensor, right: Tensor, directions: Tensor, space: Workspace | None) -> Tensor:
    """(B, k): lᵀ V r of left (B, p) and right (B, d) for every V of (k, p, d), by one product for many of them."""
    products = []
    for some in (space or Workspace()).chunks(len(directions), left.nbytes):
        few = directions[some]
        read = right @ few.flatten(0, 1).t()
        products.append(torch.bmm(read.unflatten(1, few.shape[:2]), left.unsqueeze(2)).squeeze(2))
    return torch.cat(products, 1)
