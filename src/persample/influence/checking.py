"""What is stored, held against one backward per sample; and what every way to store it costs in exactness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from ..kernels.norms import row_norms
from ..testing.compare import one_by_one
from .store import Dtype, Encoding
from .subject import Subject, evaluating


@dataclass(frozen=True)
class Check:
    """Errors relative to the largest norm: of sketches, and of inner products of samples with each other."""

    samples: int
    sketch: dict[str, float]  # of every parameter
    products: float

    @property
    def worst(self) -> float:
        """The largest of all errors."""
        return max([self.products, *self.sketch.values()])


@dataclass(frozen=True)
class Error:
    """What storing rows in a dtype adds, relative to norms."""

    rows: float  # the mean of ‖stored - row‖ / ‖row‖
    largest: float  # the largest of these
    products: float  # the root mean square error of ⟨stored_i, row_j⟩ / ‖row_i‖ ‖row_j‖


def check(subject: Subject, batch: Any) -> Check:
    """Compare the sketches of a batch with those of gradients by one `torch.autograd.grad` per loss."""
    if subject.is_sharded:
        raise ValueError(
            "a sharded model cannot be gone through once for each sample: check the index with the whole model, in one "
            "process, which has the same rows"
        )
    found = subject.rows(batch).blocks
    want, params = {name: torch.zeros_like(block) for name, block in found.items()}, subject.params
    with evaluating(subject.model), torch.enable_grad():
        losses = subject.losses(batch, 0).flatten()
        for i, grads in enumerate(one_by_one(losses, list(params.values()))):
            for (name, p), g in zip(params.items(), grads, strict=True):
                if g is not None:
                    want[name][i] = subject.sketch.of_stack(name, p, g.detach().unsqueeze(0))[0]
    errors = {name: _relative(found[name].flatten(1), block.flatten(1)) for name, block in want.items()}
    lines = [torch.cat([b.flatten(1).double().cpu() for b in blocks.values()], 1) for blocks in (found, want)]
    grams = [line @ line.t() for line in lines]
    largest = max(float(grams[1].diagonal().max()), _TINY) if len(losses) else 1.0
    products = float((grams[0] - grams[1]).abs().max()) / largest if len(losses) else 0.0
    return Check(len(losses), errors, products)


def errors_of_dtypes(rows: Tensor, widths: tuple[int, ...]) -> dict[str, Error]:
    """For every dtype, of rows (N, D)."""
    exact, found = rows.double(), {}
    norms = exact.norm(dim=1).clamp(min=_TINY)
    for dtype in get_args(Dtype):
        encoding = Encoding(dtype, widths)
        wrong = encoding.decode(*encoding.encode(rows)).double() - exact
        each = wrong.norm(dim=1) / norms
        products = (wrong @ exact.t()) / norms.unsqueeze(1) / norms
        found[dtype] = Error(float(each.mean()), float(each.max()), float(products.square().mean().sqrt()))
    return found


_TINY = 1e-300


def _relative(got: Tensor, want: Tensor) -> float:
    if not want.numel():
        return 0.0
    return float(row_norms(got - want).max()) / max(float(row_norms(want).max()), _TINY)
