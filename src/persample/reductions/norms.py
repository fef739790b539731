"""Norms of per-sample gradients."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..factors import Factor
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

    def result(self) -> Any:
        call = self._groups.call
        return self._groups.pack(
            {key: n.to(call.dtype, copy=True) for key, n in self._found.by_group(self._groups).items()}
        )


class ParameterNorms:
    """The norms of every parameter's gradients, collected and put together."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._norms: dict[str, Tensor] = {}

    def add(self, name: str, factor: Factor) -> None:
        self._norms[name] = factor.norms(self._call.space).to(self._call.device)

    def by_group(self, groups: Groups) -> Mapping[Hashable, Tensor]:
        """(B,) in float64 for every group."""
        return {key: self._together(names) for key, names in groups.members.items()}

    def _together(self, names: tuple[str, ...]) -> Tensor:
        found = [self._norms[name] for name in names if name in self._norms]
        if len(found) == 1:
            return found[0]
        return row_norms(torch.stack(found, 1)) if found else self._call.zeros(self._call.batch)
