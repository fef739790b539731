"""PyTorch's own ops of ``torch.library``: the linear layer and cross entropy in one (``F.linear_cross_entropy``).

Without options it is an ordinary product and an ordinary loss. With ``LinearCrossEntropyOptions`` it is one of two ops
that never hold all logits. The one without a reduction saves its inputs, and its backward computes a few rows of logits
again; so does the rule here, and the weight's gradient is made of outer products as that of any other linear layer. The
one that reduces, to one number for all of its rows, has computed its gradients in the forward pass and multiplies them
by its cotangent. They are one sample's if its rows are (a call for every sample); if not, nobody can take them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...factors import Dense, Factor, Outer, View
from ...factors.base import Selection
from ...factors.deferred import Deferred
from ...factors.rearrange import Cast
from ...kernels.cross_entropy import logit_gradients
from ...kernels.differentiable import is_differentiable
from ...kernels.norms import wide
from ..layout import Flow, Outcome
from ..read.library import BY_ROW, PRECOMPUTED, arguments, ignored_class, rows_at_a_time
from ..read.site import Site
from .custom import enter_op
from .dims import keep, only, whole
from .table import Layouts
from .use import Use


def rows_apart(site: Site, k: int, layouts: Layouts) -> Outcome:
    """One loss per row of the input (k = 0); weight and bias are shared by all rows."""
    shape, target = site.shapes[0], site.target(k)
    one = whole(layouts, len(target))
    if one is not None:
        return one
    return keep(only(layouts), shape, target, [0], 2) if k == 0 else Flow.SHARED


def all_rows(site: Site, k: int, layouts: Layouts) -> Outcome:
    """One loss for all rows: they are the sample's whose loss it is."""
    one = whole(layouts, len(site.target(k)))
    return Flow.PROBE if one is None else one


class _Rows:
    """What the op without a reduction has saved, by sample."""

    def __init__(self, node: Any, grouped: Sequence[Tensor]) -> None:
        _, self.weight, _, self.bias, self.classes = node.saved_tensors
        self.ignored: int = ignored_class(node)
        self.most: int = rows_at_a_time(node)
        self.x, self.target, self.g = grouped
        self._kept: Tensor | None = None

    @property
    def batch(self) -> int:
        return len(self.x)

    @property
    def positions(self) -> int:
        """T."""
        return self.x.shape[1]

    @property
    def are_few(self) -> bool:
        """Would the op take all rows at once?"""
        return self.batch * self.positions <= self.most

    def cotangents(self, samples: Selection) -> Tensor:
        """(b, T, V): those of the logits."""
        x, target, g = (t[samples] for t in (self.x, self.target, self.g))
        flat = x.flatten(0, 1), target.flatten(), g.flatten()
        gradients = logit_gradients(flat[0], self.weight, self.bias, flat[1], self.classes, self.ignored, flat[2])
        return gradients.reshape(*x.shape[:2], len(self.weight))

    def kept_cotangents(self) -> Tensor:
        """Those of all samples, which weight and bias share."""
        if self._kept is None:
            self._kept = self.cotangents(slice(0, self.batch))
        return self._kept

    def products(self, samples: Selection) -> Outer:
        """The weight's gradients."""
        return Outer(self.cotangents(samples), self.x[samples])


def linear_cross_entropy(use: Use) -> Factor | None:
    """Logits are computed again: at once if the op did so, else as many rows at a time as it takes."""
    samples = use.rows(1)
    if use.k == 0 or samples is None or arguments(BY_ROW) != _ARGUMENTS:
        return None
    node: Any = use.site.node
    if len(node.saved_tensors) != 5 or node.saved_tensors[2].is_floating_point():  # probabilities, from torch 2.15 on
        return None
    x, _, target, *_ = node.saved_tensors
    groups: dict[int, _Rows] = use.site.memo.setdefault("groups", {})  # by their T; weight and bias share them

    def made(sides: list[Tensor]) -> Factor:
        T = sides[0].shape[1]
        if T not in groups:
            groups[T] = _Rows(node, sides)
        return _weight(groups[T]) if use.k == 1 else _bias(groups[T])

    factor, dtype = samples.factor([x.to(wide(x.dtype)), target, use.g], made), use.site.metadata(use.k).dtype
    return factor if factor.dtype == dtype else View(factor, factor.shape, Cast(factor.dtype, dtype))


def _weight(rows: _Rows) -> Factor:
    if rows.are_few or is_differentiable():
        return Outer(rows.kept_cotangents(), rows.x)
    tensors = (rows.x, rows.target, rows.g, rows.weight, *[t for t in (rows.bias, rows.classes) if t is not None])
    shape = (rows.weight.shape[0], rows.weight.shape[1])
    return Deferred(rows.products, rows.batch, rows.positions, shape, tensors, rows.most // max(rows.positions, 1))


def _bias(rows: _Rows) -> Factor:
    if rows.are_few or is_differentiable():
        return Dense(rows.kept_cotangents().sum(1))
    sums = rows.x.new_empty(rows.batch, len(rows.weight))
    step = max(1, rows.most // max(rows.positions, 1))
    for start in range(0, rows.batch, step):
        some = slice(start, start + step)
        sums[some] = rows.cotangents(some).sum(1)
    return Dense(sums)


# What the op takes; one that takes anything else may compute anything else.
_ARGUMENTS = tuple(
    "input linear_weight target linear_bias weight ignore_index batch_chunk_size acc_policy acc_dtype".split()
)
enter_op(BY_ROW, linear_cross_entropy, rows_apart)
enter_op(PRECOMPUTED, None, all_rows)  # its gradients were computed in the forward pass: they are fetched by calling it
