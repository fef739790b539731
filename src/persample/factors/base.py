"""What every factor answers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Factor(ABC):
    """The gradients of B samples with respect to one tensor of a given ``shape``."""

    __slots__ = ()

    @property
    @abstractmethod
    def batch(self) -> int:
        """B."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The shape of one sample's gradient."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""

    @abstractmethod
    def stack(self, out: Tensor | None = None) -> Tensor:
        """(B, *shape): every gradient, written into ``out`` if it is given."""

    def add_to(self, out: Tensor) -> None:
        """out += stack()."""
        out += self.stack()


def deliver(value: Tensor, out: Tensor | None) -> Tensor:
    """Return ``value``, through the buffer ``out`` if there is one."""
    return value if out is None else out.copy_(value)
