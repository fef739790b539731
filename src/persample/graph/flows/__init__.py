"""How layouts flow through each kind of node: one small rule per node type, by sizes and dims alone.

A flow rule is called as ``rule(site, k, layouts)`` and says where the samples lie in backward output ``k`` when the
node's cotangents have the given ``layouts``. It answers with a layout, with ``SHARED`` (the output sums over
samples) or with ``PROBE`` (this call's data decide). Answers never depend on data, except where a rule
reads an index tensor of this very call.
"""

from . import fibres, indexing, pointwise, products, shapes, wrappers
from .registry import FLOWS, flow

__all__ = ["FLOWS", "fibres", "flow", "indexing", "pointwise", "products", "shapes", "wrappers"]
