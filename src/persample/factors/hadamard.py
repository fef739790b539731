"""Gradients times a tensor that all samples share, element by element: masks of pruning, and the like."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.devices import can_look
from ..kernels.differentiable import is_differentiable
from ..kernels.norms import root, wide, widest
from .base import Factor, Selection, Shape
from .limits import roundoff
from .outer import Outer
from .stacks import copied_to, squares
from .workspace import Workspace


class Hadamard(Factor):
    """Every gradient of ``base`` times ``by``, which has their shape."""

    __slots__ = ("base", "by")

    def __init__(self, base: Factor, by: Tensor) -> None:
        self.base, self.by = base, by

    @property
    def batch(self) -> int:
        return self.base.batch

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.base.tensors

    def __getitem__(self, samples: Selection) -> Hadamard:
        return Hadamard(self.base[samples], self.by)

    def stack(self, out: Tensor | None = None) -> Tensor:
        if is_differentiable():
            return copied_to(out, self.base.stack() * self.by)
        return torch.mul(self.base.stack(out), self.by, out=out)

    def elements(self, start: int, stop: int) -> Tensor | None:
        elements = self.base.elements(start, stop)
        return None if elements is None else elements * self.by.reshape(-1)[start:stop]

    def upcast(self, dtype: torch.dtype | None = None) -> Factor:
        base = self.base.upcast(dtype)
        return self if base is self.base else Hadamard(base, self.by.to(base.dtype))

    def prefers_stack(self, reused: bool) -> bool:
        return reused or not self._is_one_product

    @property
    def _is_one_product(self) -> bool:
        """Is every gradient one outer product, whose norm is a bilinear form of squares?"""
        outer = self.base
        return (
            isinstance(outer, Outer)
            and outer.left.ndim == 3
            and outer.positions == 1
            and self.dtype == torch.float32
            and can_look(self.device)
        )

    def _compute_norms(self, space: Workspace) -> Tensor:
        if not self._is_one_product:
            return super()._compute_norms(space)
        outer = self.base
        assert isinstance(outer, Outer)
        left, right = (t.squeeze(1).to(widest(self.device)).square() for t in (outer.left, outer.right))
        total = (left @ squares(self.by.to(left.dtype))).mul_(right).sum(1)
        return root(total) * abs(outer.scale)

    def term_norms(self) -> Tensor:
        return self.base.term_norms() * self._largest

    @property
    def _largest(self) -> Tensor:
        largest = self.by.abs().amax() if self.by.numel() else self.by.new_zeros(())
        return largest.to(widest(self.device))

    def rounding_errors(self) -> Tensor:
        return self.base.rounding_errors() * self._largest + roundoff(self.dtype) * self.term_norms()

    def weighted_sum(self, weights: Tensor, space: Workspace | None = None) -> Tensor:
        return self.base.weighted_sum(weights, space) * self.by.to(wide(self.dtype))

    def sum_squares(self, center: Tensor | None = None, space: Workspace | None = None) -> Tensor:
        if center is not None:
            return super().sum_squares(center, space)
        return self.base.sum_squares(None, space) * squares(self.by.to(wide(self.dtype)))

    def dot(self, directions: Tensor, space: Workspace | None = None) -> Tensor:
        return self.base.dot(directions * self.by, space)
