"""From a parameter's use to its factor: one small rule per node type.

A rule is called as ``rule(use)`` for one backward output that sums over samples, and returns the factor of the
tensor it belongs to, or None when it has no fast form for this layout (the exact fallback serves then).
"""

from . import broadcast, convolutions, norms, products, recurrent, tables
from .broadcast import by_probe
from .registry import RULES, Use, rule

__all__ = [
    "RULES",
    "Use",
    "broadcast",
    "by_probe",
    "convolutions",
    "norms",
    "products",
    "recurrent",
    "rule",
    "tables",
]
