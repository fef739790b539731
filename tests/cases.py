"""Every case of the library, collected from the theme modules in `case_library/`."""

from __future__ import annotations

import importlib
import pkgutil

from torch import Tensor

from tests import case_library
from tests.case_library.registry import REGISTRY, Case

for _module in pkgutil.iter_modules(case_library.__path__):
    importlib.import_module(f"tests.case_library.{_module.name}")

CASES: tuple[Case, ...] = tuple(REGISTRY.values())


def graph_nodes(losses: Tensor) -> list[str]:
    """The name of every node of the graph behind `losses`."""
    stack, seen = [losses.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [child for child, _ in node.next_functions]
    return [node.name() for node in seen]
