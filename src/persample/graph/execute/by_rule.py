"""From one use of a shared tensor to its factor, by what is known of the op."""

from __future__ import annotations

from torch import Tensor

from ...factors import Dense, Factor, Masked
from ...numberless import NoNumbers
from ..layout import Flow, Layout, Outcome, Present, labels
from ..ops.custom import taught
from ..ops.use import Use
from ..read import saved
from ..read.compiled import is_compiled
from ..read.nodes import is_opaque
from ..read.notes import lacking
from .fallback import called, sum_by_probe


def factor_by_rule(use: Use, flow: Outcome, there: Present | None = None) -> Factor | None:
    """The factor of one use, or None if there is no rule for it; of the samples that are ``there``, if some are not."""
    if isinstance(flow, Layout):
        return _separable_edge(use, flow)
    if is_opaque(use.site.node):
        return _by_teaching(use)
    try:
        factor = use.site.op.factor(use)
    except NoNumbers:  # of indices that the rule goes by
        lacking(use.site.node)
        return None
    if factor is None and there is not None and len(there.samples) == 1:
        value = called(use)  # all of it is the one sample's
        return None if value is None else Dense(value.unsqueeze(0))
    return factor if factor is not None or flow is Flow.MIXED else sum_by_probe(use)


def _by_teaching(use: Use) -> Factor | None:
    known = taught(use.site.node)
    if known is None or is_compiled(use.site.node):  # which is read once for all of its parameters
        return None if known is None else known.factor(use)
    with saved.unpacked_often(use.site.node):
        return known.factor(use)


def _separable_edge(use: Use, flow: Layout) -> Factor | None:
    """Part of a sum that is not separable, but this contribution is: compute it whole, once."""
    value = called(use)
    return None if value is None else masked(value, flow)


def masked(value: Tensor, layout: Layout) -> Factor:
    """Samples divide up the elements of one tensor."""
    return Masked(value, labels(layout, tuple(value.shape), value.device), layout.batch)
