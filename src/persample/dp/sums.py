"""Clipped sums of the parts of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .clips import Clipper, listed


class Sums:
    """Adds up what the parts of a batch give; holds nothing between batches."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params
        self.clear()

    def clear(self) -> None:
        """Forget the parts so far."""
        self._found: dict[str, Tensor] | None = None
        self._count: Tensor | None = None

    def add(self, found: Any, count: Tensor | None) -> float:
        """One more part; returns the share of its samples that were weighed down."""
        if self._found is None:
            self._found, self._count = {name: found[name].contiguous() for name in self._params}, count
        else:
            for name, total in self._found.items():
                total += found[name]
            if count is not None and self._count is not None:
                self._count += count
        weights = torch.stack([w.double() for w in listed(found.clipping.weights)])
        return float((weights < 1).any(0).double().mean()) if weights.shape[1] else 0.0

    def take(self, clipper: Clipper) -> tuple[dict[str, Tensor], Tensor | None]:
        """The sums, and the count if the clip asks for one; zeros for an empty batch."""
        found, count = self._found, self._count
        self.clear()
        if found is None:
            found = {name: torch.zeros_like(p, requires_grad=False).contiguous() for name, p in self._params.items()}
            count = clipper.nothing()
        return found, count
