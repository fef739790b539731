"""The node types that this torch knows, under the names that rules are registered by."""

from __future__ import annotations

import torch

from persample.graph.tape import _strip

NODES = frozenset(_strip(name) for name in dir(torch._C._functions) if not name.startswith("__"))

# Nodes of the newest torch that the oldest one does not have.
LATER = frozenset({"Aminmax", "Ldexp"})
