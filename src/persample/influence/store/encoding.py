"""How numbers are stored: as they are, or in fewer bytes with a scale for every row and parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Dtype = Literal["float32", "float16", "int8"]
_TORCH = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
_TOP = {"float16": 1.0, "int8": 127.0}  # what the largest number of a row and parameter becomes


@dataclass(frozen=True)
class Encoding:
    """Rows (N, D) of several parameters beside each other, which have ``widths`` columns each."""

    dtype: Dtype
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            allowed = ", ".join(repr(name) for name in get_args(Dtype))
            raise ValueError(f"dtype must be one of {allowed}, not {self.dtype!r}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of `codes`."""
        return _TORCH[self.dtype]

    @property
    def scaled(self) -> bool:
        """Are there scales?"""
        return self.dtype != "float32"

    @property
    def row_bytes(self) -> int:
        """What a row takes on disk, scales included."""
        return sum(self.widths) * self.torch_dtype.itemsize + (4 * len(self.widths) if self.scaled else 0)

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes (N, D), and scales (N, P) if there are any."""
        rows = rows.to(torch.float32)
        if not self.scaled:
            return rows, None
        top = torch.stack([_largest(part) for part in rows.split(list(self.widths), 1)], 1)
        least = torch.finfo(torch.float32).tiny  # scales below have few bits, and codes would go beyond the largest
        scales = torch.where(top > 0, (top / _TOP[self.dtype]).clamp(min=least), 1.0)
        codes = rows / self._spread(scales, range(len(self.widths)))
        return (codes.round_() if self.dtype == "int8" else codes).to(self.torch_dtype), scales

    def decode(self, codes: Tensor, scales: Tensor | None, parameters: Sequence[int] | None = None) -> Tensor:
        """Rows in float32; of some parameters only, if ``codes`` and ``scales`` have their columns alone."""
        if scales is None:
            return codes
        return codes.to(torch.float32).mul_(self._spread(scales, parameters or range(len(self.widths))))

    def _spread(self, scales: Tensor, parameters: Sequence[int]) -> Tensor:
        """(N, D): every parameter's scale in each of its columns."""
        widths = torch.tensor([self.widths[k] for k in parameters], device=scales.device)
        return scales.repeat_interleave(widths, 1)


def _largest(part: Tensor) -> Tensor:
    return part.abs().amax(1) if part.shape[1] else part.new_zeros(len(part))
