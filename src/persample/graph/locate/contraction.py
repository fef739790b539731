"""Whose are the elements of a product's gradient? The other operand says: where it is zero, nothing passes.

A matrix that routes, permutes, masks or averages rows decides by its zeros whether samples meet, and they are there to
be read: exact at any magnitude and in any dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import NOBODY, Layout, labels
from ..read.notes import by_data
from ..read.site import Flow, Outcome, Site
from .probe import fit

_EXACT = 2**53  # whole numbers up to here are exact in float64


def read_contraction(site: Site, k: int, layout: Layout, g: Tensor | None = None) -> Outcome:
    """Where the samples lie in the gradient of a product's operand, of which the sample dim is contracted.

    With the cotangent ``g`` itself, its own zeros count as well.
    """
    by_data()
    product = site.op.product
    assert product is not None
    letters, operands = product.result, product.operands
    first, second = operands
    other, name = (second, product.saved[1]) if k == first else (first, product.saved[0])
    matrix, target = site.tensor(name), site.target(k)
    passes = ((matrix if matrix.layout == torch.strided else matrix.to_dense()) != 0).to(torch.float64)
    sample_index = labels(layout, site.shapes[0], passes.device)
    if g is not None:
        sample_index = torch.where(g != 0, sample_index, NOBODY)
    varying = [d for d, n in enumerate(sample_index.shape) if n != 1]
    here = "".join(letters[d] for d in varying)
    sample_index = sample_index.reshape([sample_index.shape[d] for d in varying])
    there = "".join(c for c in operands[k] if c in here or c in operands[other])
    index = _common(sample_index, passes, f"{here},{operands[other]}->{there}", layout.batch)
    if index is None:
        return Flow.MIXED
    if not bool((index != NOBODY).any()):
        return None
    sizes = [target[d] if c in there else 1 for d, c in enumerate(operands[k])]
    return fit(index.reshape(sizes).expand(target).to("cpu"), target, layout.batch)


def _common(sample_index: Tensor, passes: Tensor, equation: str, batch: int) -> Tensor | None:
    """The one label among those that pass to each place, NOBODY where none does; None where they differ.

    Labels are all l if there are c of them, their sum is c l and the sum of their squares c l².
    """
    if passes.numel() * batch * batch >= _EXACT:
        return None
    live = (sample_index != NOBODY).to(torch.float64)
    label = sample_index.clamp(min=0).to(torch.float64)
    count, total, squares = (torch.einsum(equation, live * label**power, passes) for power in range(3))
    index = (total / count.clamp(min=1)).round()
    if not (torch.equal(total, count * index) and torch.equal(squares, count * index * index)):
        return None
    return torch.where(count > 0, index, NOBODY).to(torch.int64)
