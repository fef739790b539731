"""The batched engine: B cotangents at a time through what all samples share.

Factors keep their structure through views and casts; any other node is given stacks of B cotangents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...distributed.wrappers import passed_from, passes_on
from ...factors import Apart, Dense, Factor
from ..ops.table import Through
from ..read.saved import unpacked_often
from ..read.site import Site
from .fallback import loops, push_stacked


def lifted(site: Site, factor: Factor) -> Factor | None:
    """The factor of a node's one input without stacking, if the node is a view or a cast."""
    lift = site.op.lift
    if lift is None or len(site.shapes) != 1:
        return None
    if isinstance(factor, Apart):
        return factor.each(lambda some: lift(site, some, site.target(0)))
    return lift(site, factor, site.target(0))


def pull(site: Site, factors: Sequence[Factor | None], batch: int) -> tuple[dict[int, Factor], bool]:
    """The factors of a node's inputs from those of its outputs, and whether samples went through one at a time."""
    found = kept(site, factors)
    wanted = [k for k, _ in site.outputs if k not in found]
    if not wanted or passes_on(site.node):
        return found, False
    stacks = [None if f is None else f.stack() for f in factors]
    if site.op.pull is not None and stacks[0] is not None and len(stacks) == 1:
        return {**found, **{k: factor for k, factor in site.op.pull(site, stacks[0]).items() if k in wanted}}, False
    written = {k: Dense(v) for k, v in push_stacked(site, stacks, batch, wanted).items()}
    return {**found, **written}, loops(site)


def kept(site: Site, factors: Sequence[Factor | None]) -> dict[int, Factor]:
    """The factors of those inputs to which nothing has to be written out."""
    wanted, first = [k for k, _ in site.outputs], factors[0]
    if passes_on(site.node):
        passed = {k: factors[passed_from(site.node, k)] for k in wanted}
        return {k: factor for k, factor in passed.items() if factor is not None}
    lifted_factor = lifted(site, first) if first is not None and wanted == [0] else None
    if lifted_factor is not None:
        return {0: lifted_factor}
    return _kept_through(site, first, wanted) if first is not None and len(factors) == 1 else {}


def _kept_through(site: Site, factor: Factor, wanted: Sequence[int]) -> dict[int, Factor]:
    """The factors of those operands to which the op's result leads without anything being written out."""
    found: dict[int, Factor] = {}
    if factor.dtype == torch.float16 and not isinstance(factor, Dense):
        return found  # whose range is too small for sides that are changed before they are multiplied
    for k in wanted:
        through = site.op.through.get(k)
        if through is None:
            continue
        with unpacked_often(site.node):  # in a checkpoint: the next operand is to be read, or the node to be called
            passed = _passed(through, site, k, factor)
        if passed is not None and passed.shape == site.target(k) and passed.dtype == site.metadata(k).dtype:
            found[k] = passed
    return found


def _passed(through: Through, site: Site, k: int, factor: Factor) -> Factor | None:
    if isinstance(factor, Apart):
        return factor.each(lambda some: through(site, k, some))
    return through(site, k, factor)
