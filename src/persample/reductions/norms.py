"""Norms of per-sample gradients."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..factors import Factor, family, find_norms
from ..kernels.norms import row_norms
from .base import Call, Reduction
from .groups import Groups, Per, frozen


class Norms(Reduction):
    """The Euclidean norm of every sample's gradient: whole, per parameter, or per group of parameters.

    Args:
        per: None for one norm over all parameters; "parameter"; or groups, as a list or a dict by name. A group is a
            module, or a list of names, positions, parameters or modules.
    """

    def __init__(self, per: Per = None) -> None:
        self.per = frozen(per)

    def start(self, call: Call) -> None:
        self._groups, self._found = Groups.of(self.per, call), ParameterNorms(call)

    def add(self, name: str, factor: Factor) -> None:
        self._found.add(name, factor)

    def add_parts(self, names: Sequence[str], whole: Factor) -> None:
        self._found.add_parts(names, whole)

    def result(self) -> Any:
        call = self._groups.call
        return self._groups.pack(
            {key: n.to(call.dtype, copy=True) for key, n in self._found.by_group(self._groups).items()}
        )


_QUEUE = 2**23  # bytes of small factors that may wait for their kin


class ParameterNorms:
    """The norms of every parameter's gradients, collected and put together."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._found: list[Tensor] = []  # (n, B) for n parameters at a time
        self._rows: dict[str, int] = {}  # where a parameter's norms are among them
        self._waiting: dict[Hashable, list[tuple[str, Factor]]] = {}  # by family
        self._bytes = 0  # of those that wait

    def add(self, name: str, factor: Factor) -> None:
        """Small factors wait for more of their kind, as long as there is room."""
        factor = factor.measured
        kind, size = family(factor), factor.nbytes
        if kind is None or self._bytes + size > _QUEUE:
            self._find([(name, factor)])
        else:
            self._waiting.setdefault(kind, []).append((name, factor))
            self._bytes += size

    def add_parts(self, names: Sequence[str], whole: Factor) -> None:
        """Those that have found each other already."""
        self._keep(names, whole.measured.own_norms(self._call.space).view(len(names), self._call.batch))

    def _find(self, factors: Sequence[tuple[str, Factor]]) -> None:
        """The norms of one family."""
        found = find_norms([factor for _, factor in factors], self._call.space)
        self._keep([name for name, _ in factors], found)

    def _keep(self, names: Sequence[str], norms: Tensor) -> None:
        self._found.append(norms.to(self._call.device))
        self._rows.update(zip(names, count(len(self._rows)), strict=False))

    def by_group(self, groups: Groups) -> Mapping[Hashable, Tensor]:
        """(B,) in float64 for every group."""
        for waiting in self._waiting.values():
            self._find(waiting)
        self._waiting = {}
        every = torch.cat(self._found).t() if self._found else self._call.zeros(self._call.batch, 0)
        return {key: self._together(every, names) for key, names in groups.members.items()}

    def _together(self, every: Tensor, names: tuple[str, ...]) -> Tensor:
        rows = [self._rows[name] for name in names if name in self._rows]
        if len(rows) == 1:
            return every[:, rows[0]]
        return row_norms(every if len(rows) == every.shape[1] else every[:, rows])
