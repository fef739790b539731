"""What is asked of per-sample gradients: a reduction is shown every parameter's factor once, and then asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..distributed import Ranks
from ..factors import Factor, Workspace
from ..kernels.norms import wide, widest


@dataclass(frozen=True)
class Call:
    """What a reduction may know of the call it serves."""

    params: Mapping[str, Tensor]
    batch: int
    device: torch.device
    pack: Callable[[Mapping[str, Any]], Any]  # from results by name to the container that the parameters came in
    space: Workspace = field(default_factory=Workspace)
    ranks: Ranks | None = None  # whose samples count, too; None for the samples of this process alone

    @cached_property
    def dtype(self) -> torch.dtype:
        """What norms and inner products are given back in: float32, or float64 where a parameter is."""
        found = torch.float32
        for dtype in {p.dtype for p in self.params.values()}:
            found = torch.promote_types(found, wide(dtype).to_real())
        return found

    def zeros(self, *shape: int) -> Tensor:
        """A float64 accumulator on the losses' device."""
        return torch.zeros(shape, dtype=widest(self.device), device=self.device)

    @cached_property
    def samples(self) -> int:
        """How many samples there are on all ranks together."""
        return self.batch if self.ranks is None else self.ranks.count([self.batch], self.device)[0]

    def over_ranks(self, sums: Mapping[str, Tensor], *, real: bool = False) -> Mapping[str, Tensor]:
        """Sums over samples with those of other ranks added, for all parameters that some rank's losses reach.

        ``real`` are sums of squares.
        """
        if self.ranks is None:
            return sums
        reached = self.ranks.count([name in sums for name in self.params], self.device)
        mine: dict[str, Tensor] = {}
        for (name, p), times in zip(self.params.items(), reached, strict=True):
            dtype = wide(p.dtype).to_real() if real else wide(p.dtype)
            if times:
                mine[name] = sums[name].to(dtype) if name in sums else torch.zeros_like(p, dtype=dtype).detach()
        return self.ranks.sum(mine)

    def pack_sums(self, sums: Mapping[str, Tensor]) -> Any:
        """One tensor like each parameter; zeros for those that the losses do not reach."""
        return self.pack(
            {
                name: sums[name].to(p.dtype) if name in sums else torch.zeros_like(p, requires_grad=False)
                for name, p in self.params.items()
            }
        )


class Reduction(ABC):
    """Something computed from the gradients of all samples, without all of them being written out.

    To make one, subclass and write three methods; ``ps.reduce`` calls them on a copy of the object, so that what
    they store on ``self`` belongs to one call. ``passes`` says how often `add` goes through a factor (a factor that
    is gone through often may be written out once), ``keeps_factors`` whether factors are kept until `result`,
    ``over_ranks`` whether `result` adds up what the ranks of a ``process_group=`` have (by ``call.over_ranks`` and
    ``call.samples``; others are refused there). The copy is shallow: what changes during a call belongs in `start`, not
    in ``__init__``.
    """

    passes = 1
    keeps_factors = False
    over_ranks = False

    @abstractmethod
    def start(self, call: Call) -> None:
        """Before anything is known but the parameters and the number of samples."""

    @abstractmethod
    def add(self, name: str, factor: Factor) -> None:
        """Called once for every parameter that the losses reach, in the order in which the backward comes to them."""

    @abstractmethod
    def result(self) -> Any:
        """After the backward."""
