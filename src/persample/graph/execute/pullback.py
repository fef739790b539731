"""The batched engine: B cotangents at a time through what all samples share.

Factors keep their structure through views and casts; any other node is given stacks of B cotangents.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...distributed.wrappers import passed_from, passes_on
from ...factors import Apart, Dense, Factor
from ..ops.table import Through
from ..read.saved import in_checkpoint
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
    wanted = [k for k, _ in site.outputs]
    if passes_on(site.node):
        passed = {k: factors[passed_from(site.node, k)] for k in wanted}
        return {k: factor for k, factor in passed.items() if factor is not None}, False
    first = factors[0]
    lifted_factor = lifted(site, first) if first is not None and wanted == [0] else None
    if lifted_factor is not None:
        return {0: lifted_factor}, False
    kept = _kept_through(site, first, wanted) if first is not None and len(factors) == 1 else {}
    wanted = [k for k in wanted if k not in kept]
    if not wanted:
        return kept, False
    stacks = [None if f is None else f.stack() for f in factors]
    if site.op.pull is not None and stacks[0] is not None and len(stacks) == 1:
        return {**kept, **{k: factor for k, factor in site.op.pull(site, stacks[0]).items() if k in wanted}}, False
    written = {k: Dense(v) for k, v in push_stacked(site, stacks, batch, wanted).items()}
    return {**kept, **written}, loops(site)


def _kept_through(site: Site, factor: Factor, wanted: Sequence[int]) -> dict[int, Factor]:
    """The factors of those operands to which the op's result leads without anything being written out."""
    found: dict[int, Factor] = {}
    if in_checkpoint(site.node):  # what it has saved can be read once, and the node may have to be called
        return found
    for k in wanted:
        through = site.op.through.get(k)
        passed = None if through is None else _passed(through, site, k, factor)
        if passed is not None and passed.shape == site.target(k) and passed.dtype == site.metadata(k).dtype:
            found[k] = passed
    return found


def _passed(through: Through, site: Site, k: int, factor: Factor) -> Factor | None:
    if isinstance(factor, Apart):
        return factor.each(lambda some: through(site, k, some))
    return through(site, k, factor)
