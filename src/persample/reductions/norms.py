"""Norms of per-sample gradients, over all parameters or groups of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..factors import Dense, Factor, Part, Workspace, regroup
from ..factors.dense import is_small_stack
from ..factors.stacks import real_matrix, real_rows
from ..kernels.devices import can_look
from ..kernels.differentiable import is_differentiable
from ..kernels.norms import norms_of_norms, row_norms, wide
from .base import Call, Reduction
from .groups import Groups, Per, as_groups


class Norms(Reduction):
    """The Euclidean norm of every sample's gradient: whole, per parameter, or per group of parameters.

    Args:
        per: None for one norm over all parameters; "parameter"; or groups, as a list or a dict by name. A group is a
            module, or a list of names, positions, parameters or modules.
    """

    in_portions = True

    def __init__(self, per: Per = None) -> None:
        self.per = as_groups(per)

    def start(self, call: Call) -> None:
        self._groups, self._norms = Groups.of(self.per, call), ParameterNorms(call)

    def add(self, name: str, factor: Factor) -> None:
        self._norms.add(name, factor)

    def result(self) -> Any:
        call = self._groups.call
        return self._groups.pack(
            {key: n.to(call.dtype, copy=True) for key, n in self._norms.by_group(self._groups).items()}
        )

    def join(self, portions: Sequence[Any], call: Call) -> Any:
        return call.rows(portions)


class ParameterNorms:
    """Collects the norms of every parameter's gradients, and combines those of a group.

    Small ones may be computed ``together``, which depends on how many samples there are.
    """

    def __init__(self, call: Call, *, together: bool = True) -> None:
        self._call = call
        self._together = together and not can_look(call.device)
        self._norms: list[Tensor] = []  # (n, B) for n parameters at a time
        self._squares: list[Tensor] = []  # likewise, where norms of zero have no derivatives: see `_apart_from_zeros`
        self._count = 0  # of all their rows
        self._rows: dict[str, int] = {}  # where a parameter's norms are among them
        self._parts: dict[str, Factor] = {}  # which wait for the other parts of their whole, to be computed at once
        self._small: dict[str, Dense] = {}  # which wait for others of their group, where launches are what costs

    def add(self, name: str, factor: Factor) -> None:
        """Compute the norms of one parameter. Parts wait for each other: their whole computes all norms at once."""
        if not isinstance(factor, Part):
            if self._together and is_small_stack(factor) and factor.device == self._call.device:
                self._small[name] = factor
            else:
                self._compute([name], factor)
            return
        self._parts[name] = factor
        if factor.place == factor.count - 1:  # the last one, after which nobody else may need the whole
            self._compute_parts()

    def _compute_parts(self) -> None:
        for names, whole in regroup(self._parts):
            self._compute(names, whole)
        self._parts = {}

    def _compute(self, names: Sequence[str], factor: Factor) -> None:
        norms = factor.cached_norms(self._call.space)
        if is_differentiable():
            norms, squares = _apart_from_zeros(factor, norms, self._call.space)
            self._squares.append(squares.view(len(names), self._call.batch).to(self._call.device))
        norms = norms.view(len(names), self._call.batch)
        if not can_look(factor.device) and wide(factor.dtype).to_real() != self._call.dtype:
            # Elements may have been too large, which nobody has looked at; in a narrower result it shows by itself.
            norms = norms.masked_fill(norms > torch.finfo(wide(factor.dtype)).max, torch.inf)
        self._add_rows(norms.to(self._call.device), names)

    def _add_rows(self, norms: Tensor, names: Sequence[str]) -> None:
        """Keep norms (n, B): one row for each name, or one for all of them together."""
        places = range(self._count, self._count + len(norms))
        self._rows |= zip(names, places if len(norms) == len(names) else repeat(self._count), strict=False)
        self._norms.append(norms)
        self._count += len(norms)

    def by_group(self, groups: Groups) -> Mapping[Hashable, Tensor]:
        """(B,) in float64 for every group."""
        self._compute_parts()
        small = self._small.keys()
        if small and all(small <= set(names) or small.isdisjoint(names) for names in groups.members.values()):
            self._add_rows(self._of_small(self._small.values()).unsqueeze(0), list(self._small))
            self._small = {}
        every = torch.cat(self._norms).t() if self._norms else self._call.zeros(self._call.batch, 0)
        return {key: self._of_group(every, names) for key, names in groups.members.items()}

    def _of_small(self, factors: Collection[Dense]) -> Tensor:
        """(B,): the norms of all of these together."""
        rows = [real_matrix(f.value) for f in factors]
        return row_norms(rows[0] if len(rows) == 1 else torch.cat(rows, 1))

    def _of_group(self, every: Tensor, names: tuple[str, ...]) -> Tensor:
        rows = sorted({self._rows[name] for name in names if name in self._rows})
        small = [self._small[name] for name in names if name in self._small]
        if len(rows) + len(small) == 1:
            return every[:, rows[0]] if rows else self._of_small(small)
        norms = every
        if len(rows) < every.shape[1]:  # a list of places would be copied to the device
            norms = torch.stack([every[:, row] for row in rows], 1) if rows else every[:, :0]
        if small:
            norms = torch.cat([norms, self._of_small(small).unsqueeze(1)], 1)
        total = norms_of_norms(norms, self._call.dtype)
        return self._with_squares(total, rows) if self._squares and not small else total

    def _with_squares(self, total: Tensor, rows: Sequence[int]) -> Tensor:
        """(total² + squares)^½, for squares of zero, which have derivatives."""
        squares = torch.cat(self._squares)
        if not squares.requires_grad:
            return total
        unit = total.masked_fill(total == 0, 1)
        return total * (1 + torch.stack([squares[row] for row in rows]).sum(0) / unit.square()).sqrt()


def _apart_from_zeros(factor: Factor, norms: Tensor, space: Workspace) -> tuple[Tensor, Tensor]:
    """(B,) each: norms that are constant where they are zero, and squares of norms, which are zero elsewhere.

    A norm has no second derivative at zero, but its square has, and so has the norm of several gradients together.
    """
    nothing = torch.zeros_like(norms.detach())
    zero = norms.detach() == 0
    if not can_look(norms.device) or not bool(zero.any()):
        return norms, nothing
    none, some = zero.nonzero().squeeze(1), (~zero).nonzero().squeeze(1)
    squares = real_rows(factor[none].stack()).to(norms.dtype).square().sum(1)
    return nothing.index_copy(0, some, factor[some].norms(space)), nothing.index_copy(0, none, squares)
