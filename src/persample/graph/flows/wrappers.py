"""Nodes by which DDP and FSDP2 are called: cotangents go on as they are."""

from __future__ import annotations

from ...distributed.wrappers import passed_from, passes_on
from ..site import Fate, Flow, Site
from .registry import Layouts, flow


@flow("_DDPSink RegisterPostBackwardFunction")
def handed_on(site: Site, k: int, layouts: Layouts) -> Fate:
    """Every input has the cotangent of one output."""
    return layouts[passed_from(site.node, k)] if passes_on(site.node) else Flow.PROBE
