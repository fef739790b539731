"""Gradients held as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Factor, Shape, deliver


class Dense(Factor):
    """value (B, *shape): scales and shifts of norms, biases, broadcast parameters, whatever was pulled back."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @property
    def batch(self) -> int:
        return len(self.value)

    @property
    def shape(self) -> Shape:
        return tuple(self.value.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def stack(self, out: Tensor | None = None) -> Tensor:
        return deliver(self.value, out)

    def add_to(self, out: Tensor) -> None:
        out += self.value


class Masked(Factor):
    """value (*shape) of which every element is one sample's: gradient i is value where index == i, else 0."""

    __slots__ = ("_batch", "index", "value")

    def __init__(self, value: Tensor, index: Tensor, batch: int) -> None:
        self.value, self.index, self._batch = value, index.to(value.device), batch

    @property
    def batch(self) -> int:
        return self._batch

    @property
    def shape(self) -> Shape:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def stack(self, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = self.value.new_empty(self._batch, *self.value.shape)
        if self.index.numel() == 1:
            out.zero_()
            if (sample := int(self.index)) >= 0:
                out[sample] = self.value
            return out
        samples = torch.arange(self._batch, device=self.value.device)
        mine = self.index.unsqueeze(0) == samples.reshape(-1, *[1] * self.value.ndim)
        return out.copy_(self.value.unsqueeze(0).expand_as(out)).masked_fill_(~mine, 0)

    def add_to(self, out: Tensor) -> None:
        if self.index.numel() == 1:
            if (sample := int(self.index)) >= 0:
                out[sample] += self.value
        else:
            out += self.stack()
