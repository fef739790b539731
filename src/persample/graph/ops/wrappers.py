"""Nodes by which DDP and FSDP2 are called: cotangents go on as they are."""

from __future__ import annotations

from ...distributed.wrappers import passed_from, passes_on
from ..layout import Outcome
from ..read.site import Site
from .table import EVERY, Layouts, Undecided, op


def handed_on(site: Site, k: int, layouts: Layouts) -> Outcome:
    """Every input has the cotangent of one output."""
    if not passes_on(site.node):
        raise Undecided
    return layouts[passed_from(site.node, k)]


op("_DDPSink RegisterPostBackwardFunction", flow={EVERY: handed_on})
