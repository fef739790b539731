"""Many small factors asked as one: what a question costs beside arithmetic is paid once for all of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from .base import Factor, vanishing
from .workspace import Workspace

_SMALL = 2**17  # bytes; of larger factors, a copy costs more than it saves
_SMALL_SUM = 2**15  # bytes; the same for their sums


def family(factor: Factor) -> Hashable:
    """Equal for small factors that are better asked together; None for others."""
    return factor.kin if factor.nbytes <= _SMALL else None


def find_norms(group: Sequence[Factor], space: Workspace) -> Tensor:
    """(n, B): the norms of n factors of one family, only to be read; each factor knows its own from now on."""
    if len(group) == 1:
        return group[0].own_norms(space).unsqueeze(0)
    unknown = list({id(factor): factor for factor in group if not factor.knows_norms}.values())
    if len(unknown) > 1:
        unknown[0].share_norms(unknown, space)
    return torch.stack([factor.own_norms(space) for factor in group])


def bounded_sums(factors: dict[str, Factor], weights: Tensor, space: Workspace) -> dict[str, Tensor]:
    """`bounded_sum` of every factor, in its own dtype; ``factors`` is emptied on the way."""
    families: dict[Hashable, list[str]] = {}
    for name, factor in factors.items():
        families.setdefault(family(factor) or name, []).append(name)
    apart, found = vanishing(weights), dict[str, Tensor]()
    for names in families.values():
        group = [factors.pop(name) for name in names]
        sums = _family_sums(group, weights, apart, space)
        found.update((name, total.to(group[0].dtype)) for name, total in zip(names, sums, strict=True))
    return found


def _family_sums(group: Sequence[Factor], weights: Tensor, apart: Tensor, space: Workspace) -> Sequence[Tensor]:
    """At once, unless some samples have to be written out."""
    first = group[0]
    alone = len(group) == 1 or first.numel * first.dtype.itemsize > _SMALL_SUM or bool(apart.numel())
    if alone or (first.cancels and any(factor.doubtful(space).numel() for factor in group)):
        return [factor.bounded_sum(weights, space, apart) for factor in group]
    return first.weighted_sums(group, weights.to(first.device), space)
