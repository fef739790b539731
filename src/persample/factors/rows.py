"""Gradients of tables that are read by row: embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Factor, Shape


class Rows(Factor):
    """gradient[b][ids[b, t]] += dy[b, t], for ids (B, T) and dy (B, T, *row) of a table (V, *row); id -1 is skipped."""

    __slots__ = ("dy", "ids", "size")

    def __init__(self, ids: Tensor, dy: Tensor, size: int) -> None:
        self.ids, self.dy, self.size = ids, dy, size

    @property
    def batch(self) -> int:
        return len(self.ids)

    @property
    def shape(self) -> Shape:
        return (self.size, *self.dy.shape[2:])

    @property
    def dtype(self) -> torch.dtype:
        return self.dy.dtype

    def stack(self, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = self.dy.new_zeros(self.batch, *self.shape)
        else:
            out.zero_()
        self.add_to(out)
        return out

    def add_to(self, out: Tensor) -> None:
        if not out.is_contiguous():
            out += self.stack()
            return
        offset = torch.arange(self.batch, device=self.ids.device).unsqueeze(1) * self.size
        live = (self.ids >= 0).reshape(-1)
        places = (self.ids + offset).reshape(-1)
        values = self.dy.reshape(len(places), *self.dy.shape[2:]).to(out.dtype)
        if not bool(live.all()):
            places, values = places[live], values[live]
        out.view(self.batch * self.size, *self.dy.shape[2:]).index_add_(0, places, values)
