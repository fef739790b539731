"""Small models, data and losses for indexes; importable by other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persample import influence as pi


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Tanh(), nn.Linear(20, 3))


def losses_fn(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def batches_of(count: int = 7, size: int = 5, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """The last one is shorter."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [size] * (count - 1) + [2]
    return [(torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


def token_losses_fn(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


def index_of(folder: Path, dtype: Any = "float32", sketch: pi.Sketch | None = None, seed: int = 0) -> pi.Index:
    return pi.Index(folder, model_of(seed), losses_fn, sketch=sketch or pi.Blocks(4, 4, seed=3), dtype=dtype)


def build(rank: int, world: int, folder: str, dtype: str = "float32") -> int:
    """Called in several processes; two batches for each chunk."""
    index = index_of(Path(folder), dtype)
    index.build(batches_of(), chunk_bytes=CHUNK[dtype], progress=False)
    return len(index)


def content(folder: Path) -> dict[str, bytes]:
    """Every file of an index."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


_ROW = {"float32": 4 * (16 + 4 + 12 + 3), "float16": 2 * 35 + 16, "int8": 35 + 16}
CHUNK = {dtype: 2 * 5 * size for dtype, size in _ROW.items()}  # bytes of two batches
