"""Norms of per-sample gradients, over all parameters or groups of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..factors import Factor, Part, regroup
from ..kernels.norms import row_norms
from .base import Call, Reduction
from .groups import Groups, Per, as_groups


class Norms(Reduction):
    """The Euclidean norm of every sample's gradient: whole, per parameter, or per group of parameters.

    Args:
        per: None for one norm over all parameters; "parameter"; or groups, as a list or a dict by name. A group is a
            module, or a list of names, positions, parameters or modules.
    """

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


class ParameterNorms:
    """Collects the norms of every parameter's gradients, and combines those of a group."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._norms: list[Tensor] = []  # (n, B) for n parameters at a time
        self._rows: dict[str, int] = {}  # where a parameter's norms are among them
        self._parts: dict[str, Factor] = {}  # which wait for the other parts of their whole, to be computed at once

    def add(self, name: str, factor: Factor) -> None:
        """Compute the norms of one parameter. Parts wait for each other: their whole computes all norms at once."""
        if not isinstance(factor, Part):
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
        norms = factor.cached_norms(self._call.space).view(len(names), self._call.batch)
        self._norms.append(norms.to(self._call.device))
        self._rows.update(zip(names, count(len(self._rows)), strict=False))

    def by_group(self, groups: Groups) -> Mapping[Hashable, Tensor]:
        """(B,) in float64 for every group."""
        self._compute_parts()
        every = torch.cat(self._norms).t() if self._norms else self._call.zeros(self._call.batch, 0)
        return {key: self._of_group(every, names) for key, names in groups.members.items()}

    def _of_group(self, every: Tensor, names: tuple[str, ...]) -> Tensor:
        rows = [self._rows[name] for name in names if name in self._rows]
        if len(rows) == 1:
            return every[:, rows[0]]
        return row_norms(every if len(rows) == every.shape[1] else every[:, rows])
