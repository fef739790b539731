"""Ways to the norms of a factor's gradients that are shared by several forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.certificates import certify
from ..kernels.devices import can_look
from ..kernels.differentiable import is_differentiable
from ..kernels.gram import gram_norms
from ..kernels.norms import row_norms
from .workspace import Workspace

if TYPE_CHECKING:
    from .base import Factor


def norms_from_stacks(factor: Factor, space: Workspace) -> Tensor:
    """(B,): the norms of gradients that are written out, a few samples at a time."""
    norms = [row_norms(stack) for _, stack in factor.stacks(space)]
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def norms_from_gram(
    factor: Factor,
    pairs: Iterable[Sequence[Tensor]],
    groups: int,
    space: Workspace,
    scale: float = 1.0,
    memo: dict[str, Tensor] | None = None,
) -> Tensor:
    """(B,): the norms of Σ_t left[t] ⊗ right[t], times ``scale``, from the Gram matrices of both sides.

    Each of ``pairs`` is left and right (b·groups, T, ·) for the next b samples.
    """
    norms, trusted = [], []
    for left, right in pairs:
        shared = memo if len(left) == factor.batch * groups else None
        each, ok = gram_norms(left, right, factor.dtype, shared)
        if groups != 1:
            if is_differentiable():  # the norm of a group of zeros has no second derivative
                ok = ok & (each.detach() > 0)
            each, ok = row_norms(each.view(-1, groups)), ok.view(-1, groups).all(1)
        norms.append(each)
        trusted.append(ok)
    return with_untrusted_recomputed(factor, torch.cat(norms) * scale, torch.cat(trusted), space)


def with_untrusted_recomputed(factor: Factor, norms: Tensor, trusted: Tensor, space: Workspace) -> Tensor:
    """``norms``, where those that are not ``trusted`` are replaced by norms of gradients that are written out.

    Where numbers cannot be looked at, all are computed such that they can be trusted.
    """
    if not can_look(factor.device):
        certify(trusted, "norms from Gram matrices have lost digits")
        return norms
    factor._cancelling = (~trusted).nonzero().squeeze(1)
    if factor._cancelling.numel():
        norms[factor._cancelling] = norms_from_stacks(factor[factor._cancelling], space)
    return norms


def without_norms_of_zero(factor: Factor, parts: Iterable[Factor], space: Workspace) -> Tensor | None:
    """(B,): the norms of a sum of ``parts`` if they are to be differentiated and one of a sample's parts is zero.

    The norm of that part has no second derivative there, but that of the sum has: such samples are written out.
    """
    if not is_differentiable() or not can_look(factor.device):
        return None
    zero = torch.stack([part.norms(space).detach() == 0 for part in parts]).any(0)
    if not bool(zero.any()):
        return None
    some, others = (which.nonzero().squeeze(1) for which in (zero, ~zero))
    written = norms_from_stacks(factor[some], space)
    norms = torch.zeros(factor.batch, dtype=written.dtype, device=written.device).index_copy(0, some, written)
    return norms.index_copy(0, others, factor[others].norms(space)) if len(others) else norms
