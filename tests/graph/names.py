"""The node types that this torch knows, under the names that rules are registered by, and the names that rules read."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib.resources.abc import Traversable

import torch

from persample.distributed.tensor_parallel import DTENSOR_FUNCTIONS
from persample.distributed.wrappers import WRAPPER_FUNCTIONS
from persample.graph.read.nodes import _strip

NODES = frozenset(_strip(name) for name in dir(torch._C._functions) if not name.startswith("__"))

# Those of no op that anybody calls: leaves, what PyTorch puts where there is nothing to differentiate, copies of views
# for compilers, nested tensors, PyTorch's own tests.
NO_OPS = frozenset(
    name
    for name in NODES
    if name in {"AccumulateGrad", "DelayedError", "Error", "NotImplemented", "UndefinedGrad"}
    or name.endswith(("_copy", "Autograd", "AutogradNestedTensor", "AutogradCUDA"))
    or name.startswith(("Test", "Nested"))
)

# Nodes that not all releases have, with those of `persample._releases.TESTED` that do.
SOME: Mapping[str, frozenset[tuple[int, int]]] = {
    "Cholesky": frozenset({(2, 13)}),
}

# Python nodes of DDP, FSDP2 and DTensors; tests/distributed/test_names.py looks them up.
WRAPPERS = frozenset((*WRAPPER_FUNCTIONS, *DTENSOR_FUNCTIONS))

_READERS = {"number", "numbers", "tensor", "tensors", "optional", "value", "dims"}


def names_read(folder: Traversable) -> Iterator[str]:
    """The names that rules and flows pass to a site's readers."""
    for file in folder.iterdir():
        if file.is_dir():
            yield from names_read(file)
        elif file.name.endswith(".py"):
            for call in ast.walk(ast.parse(file.read_text())):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _READERS:
                    yield from _literals(call.args[0])


def _literals(argument: ast.expr) -> Iterator[str]:
    if isinstance(argument, ast.IfExp):
        yield from _literals(argument.body)
        yield from _literals(argument.orelse)
    elif isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        yield argument.value
